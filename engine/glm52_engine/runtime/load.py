"""From a checkpoint directory to the parts of an engine, in the order in which a start can fail cheaply."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from glm52_engine.checkpoint import ModelSpec, Weights, load_weights, read_model_spec, weight_bytes
from glm52_engine.config import Accelerator, ConfigError, EngineConfig, KvCacheDtype, Role, RoleConfig
from glm52_engine.kv.hisparse import MOST_ROWS
from glm52_engine.kv.pinning import check_memlock, host_slab, touch
from glm52_engine.kv.pools import LAYOUT_VERSION, ROPE_LAYOUT, KvLayout, Pool
from glm52_engine.model import Model
from glm52_engine.model.cache import HotCache
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.executor import Executor, HostExecutor
from glm52_engine.runtime.measures import Measures
from glm52_engine.runtime.preflight import check_memory, memory_limit
from glm52_engine.runtime.progress import ProgressLines
from glm52_engine.runtime.rank import StepLimits, intra_op_threads
from glm52_engine.schedule import Limits, blocks_for
from glm52_engine.sizing import GIB, gib, pool_blocks
from glm52_engine.tokenizer import decodable_bound, eos_token_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What `LocalEngine` is made of."""

    executors: list[Executor]
    limits: Limits
    step: StepLimits
    layout: dict[str, str | int]
    pool_seconds: float
    """That the pools took to get their memory and, for GPUs, to be pinned."""


STEP_TOKENS: dict[Accelerator, int] = {"cpu": 512, "nvidia": 8192}
"""Most rows of one step: what a prompt's chunk costs the decodes beside it, against the products' size."""


@dataclass(frozen=True, slots=True)
class Options:
    """How one role's engine is to be. Lengths in tokens.

    `vocab_bound` and `eos_ids` come from the checkpoint's tokenizer files when None; `step_tokens`, the most rows of a
    step, suits the accelerator when None.
    """

    role: RoleConfig
    max_model_len: int
    block_size: int
    kv_cache_dtype: KvCacheDtype = "auto"
    accelerator: Accelerator = "cpu"
    vocab_bound: int | None = None
    eos_ids: frozenset[int] | None = None
    step_tokens: int | None = None

    @staticmethod
    def of(config: EngineConfig, role: Role) -> Options:
        model = config.model
        return Options(
            config.role(role), model.max_model_len, config.block_size, model.kv_cache_dtype, config.accelerator
        )


def measure(path: Path, options: Options) -> Measures:
    """Raises ConfigError where checkpoint, tokenizer and configuration do not fit each other."""
    role, block_size, accelerator = options.role, options.block_size, options.accelerator
    spec = read_model_spec(path)
    kv = KvLayout.of(spec, block_size, _stored_as(options.kv_cache_dtype, accelerator))
    blocks = pool_blocks(role.host_pool_gib * GIB, block_bytes=kv.block_bytes)
    _check_lengths(path, spec, kv, role, blocks=blocks, max_model_len=options.max_model_len)
    bound = decodable_bound(path) if options.vocab_bound is None else options.vocab_bound
    ends = eos_token_ids(path) if options.eos_ids is None else options.eos_ids
    _check_vocabulary(path, spec, bound, ends)
    limits = Limits(options.max_model_len, block_size, role.max_num_seqs, blocks, spec.vocab_size, role.max_waiting)
    budget = options.step_tokens or STEP_TOKENS[accelerator]
    step = StepLimits(budget=budget, least_prefill=max(1, budget // 4), vocab_bound=bound, eos_ids=ends)
    always = role.hi_sparse is not None and role.hi_sparse.mode == "always"
    return Measures(spec, kv, limits, step, _hot_rows(path, spec, role), always)


def _stored_as(kv_cache_dtype: KvCacheDtype, accelerator: Accelerator) -> KvCacheDtype:
    """GPUs compute in bfloat16 whatever the checkpoint's dtype is, and `auto` is what they compute in."""
    return "bf16" if (kv_cache_dtype, accelerator) == ("auto", "nvidia") else kv_cache_dtype


def load_engine(path: Path, options: Options, *, on_phase: Callable[[str], None]) -> LocalEngine:
    """Blocking: config, preflight, weights, pools, one real forward per rank. Raises ConfigError.

    On a GPU it has one rank: several share the experts, as a replica's do.
    """
    role, on_cpu = options.role, options.accelerator == "cpu"
    parts = load_parts(path, options, on_phase=on_phase)
    engine = LocalEngine(
        parts.executors,
        limits=parts.limits,
        step=parts.step,
        layout=parts.layout,
        prefix_cache=role.prefix_cache,
        # On a CPU nothing runs beside the host: a step ahead would only hold up the tokens of the one before.
        launch_ahead=role.launch_ahead and not on_cpu,
        pool_seconds=parts.pool_seconds,
    )
    on_phase("first forward" if on_cpu else "capturing graphs and first forward")
    engine.warm_up()
    return engine


def load_parts(path: Path, options: Options, *, on_phase: Callable[[str], None]) -> Parts:
    torch.set_num_threads(intra_op_threads())
    role, accelerator = options.role, options.accelerator
    on_phase("reading the model's config")
    measures = measure(path, options)
    spec, limits, step = measures.spec, measures.limits, measures.step
    on_phase("checking the memory limit")
    check_memory(role, weights=weight_bytes(spec), accelerator=accelerator, limit=memory_limit())
    load = _on_host if accelerator == "cpu" else _on_gpu
    executors, contract, seconds = load(path, measures, role, on_phase)
    return Parts(executors, limits, step, contract, seconds)


def _on_host(
    path: Path, measures: Measures, role: RoleConfig, on_phase: Callable[[str], None]
) -> tuple[list[Executor], dict[str, str | int], float]:
    """All ranks compute with the same weights, which lie on the files' pages."""
    spec, kv, limits, step = measures.spec, measures.kv, measures.limits, measures.step
    on_phase("reading weights")
    weights = load_weights(path, spec, on_progress=ProgressLines("reading weights", on_phase))
    model = Model(spec, weights.tensors)
    on_phase("touching the pools")
    began = time.monotonic()
    pools = [_pool(kv, limits, rank) for rank in range(role.ranks_per_host)]
    seconds = time.monotonic() - began
    seat = blocks_for(limits.max_model_len, limits.block_size)
    executors: list[Executor] = [
        HostExecutor(
            model,
            pool,
            seats=limits.seats,
            blocks_per_seat=seat,
            vocab_bound=step.vocab_bound,
            hot=hot_cache(measures, pool),
        )
        for pool in pools
    ]
    return executors, kv_contract(kv, weights), seconds


def hot_cache(measures: Measures, pool: Pool) -> HotCache | None:
    """What a rank on the CPU decodes through; None without HiSparse."""
    spec, rows = measures.spec, measures.hot_rows
    if rows is None:
        return None
    limits = measures.limits
    longest = None if measures.hot_always else blocks_for(limits.max_model_len, limits.block_size)
    return HotCache(
        measures.kv, pool, spec.indexer_types, top_k=spec.index_topk, seats=limits.seats, rows=rows, longest=longest
    )


def _on_gpu(
    path: Path, measures: Measures, role: RoleConfig, on_phase: Callable[[str], None]
) -> tuple[list[Executor], dict[str, str | int], float]:
    spec, kv, limits = measures.spec, measures.kv, measures.limits
    from glm52_engine.runtime.device import gpus

    gpus.check_count(1)
    check_memlock(limits.blocks * kv.block_bytes)
    on_phase("reading weights")
    told = ProgressLines("reading weights", on_phase)
    weights = load_weights(path, spec, device=gpus.device(0), fp8="keep", on_progress=told)
    contract = kv_contract(kv, weights)
    on_phase("pinning the pool")
    pool, pinned = gpus.pinned_pool(0, kv, limits.blocks, ProgressLines("pinning the pool", on_phase))
    with contextlib.ExitStack() as failed:
        failed.callback(pinned.release)
        made = gpus.executor(0, measures, weights, pool, role, pinned.release)
        failed.pop_all()
    return [made], contract, pinned.seconds


def _pool(kv: KvLayout, limits: Limits, rank: int) -> Pool:
    slab = host_slab(limits.blocks * kv.block_bytes)
    touch(slab)
    pool = Pool(kv, limits.blocks, slab)
    log.info("rank %d: pool of %d blocks, %d tokens", rank, limits.blocks, limits.blocks * limits.block_size)
    return pool


def kv_contract(kv: KvLayout, weights: Weights) -> dict[str, str | int]:
    """What two engines must have in common before one may read the other's blocks."""
    return {
        "version": LAYOUT_VERSION,
        "model": weights.fingerprint,
        "dtype": str(kv.dtype).removeprefix("torch."),
        "rope": ROPE_LAYOUT,
        "layers": kv.layers,
        "full_layers": ",".join(map(str, kv.full_layers)),
        "latent": kv.latent,
        "mla_row": kv.mla_row,
        "index_row": kv.index_row,
        "block_size": kv.block_size,
    }


def _hot_rows(path: Path, spec: ModelSpec, role: RoleConfig) -> int | None:
    if role.hi_sparse is None:
        return None
    rows = role.hi_sparse.device_buffer_size or 2 * spec.index_topk
    if not spec.index_topk <= rows <= MOST_ROWS:
        raise ConfigError(
            f"hi_sparse.device_buffer_size: found {rows}; a step of {path / 'config.json'} reads {spec.index_topk} "
            f"tokens of a request (index_topk), so that expected are {spec.index_topk} to {MOST_ROWS}"
        )
    return rows


def _check_vocabulary(path: Path, spec: ModelSpec, bound: int, ends: frozenset[int]) -> None:
    if bound > spec.vocab_size:
        raise ConfigError(
            f"{path}: the tokenizer has ids up to {bound - 1}, the model a vocabulary of {spec.vocab_size}"
        )
    strange = sorted(token for token in ends if not 0 <= token < bound)
    if strange:
        # Such an id is never sampled: an output would end at max_tokens only, for ever in the middle of a sentence.
        raise ConfigError(f"{path}: eos_token_id: found {strange}; expected ids below the tokenizer's {bound}")


def _check_lengths(
    path: Path, spec: ModelSpec, kv: KvLayout, role: RoleConfig, *, blocks: int, max_model_len: int
) -> None:
    if max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"model.max_model_len: found {max_model_len}; {path / 'config.json'} allows at most "
            f"{spec.max_position_embeddings} (max_position_embeddings)"
        )
    needed = blocks_for(max_model_len, kv.block_size)
    if blocks < needed:
        raise ConfigError(
            f"host_pool_gib: found {role.host_pool_gib}, which holds {blocks} blocks of {kv.block_size} tokens × "
            f"{kv.token_bytes} bytes; one request of max_model_len {max_model_len} needs {needed} "
            f"({gib(needed * kv.block_bytes)})"
        )
