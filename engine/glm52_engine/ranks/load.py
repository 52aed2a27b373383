"""What one rank host loads: weights of its ranks' experts and their pools, both at once; on GPUs, rank beside rank."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from glm52_engine.checkpoint import ModelSpec, Weights, load_weights, read_fingerprint, weight_bytes
from glm52_engine.config import EngineConfig, Role, RoleConfig
from glm52_engine.kv import Pool
from glm52_engine.kv.pinning import Pinned, check_memlock
from glm52_engine.lifecycle.phases import Phases
from glm52_engine.model import Model
from glm52_engine.ranks.captures import Captures
from glm52_engine.ranks.collectives import LateExchange
from glm52_engine.ranks.experts import ShardedMoe
from glm52_engine.ranks.follower import LockStep, ShardedExecutor
from glm52_engine.ranks.lane import Lane
from glm52_engine.ranks.messages import Terms
from glm52_engine.ranks.spans import RankSpan, experts_of
from glm52_engine.runtime.load import Options, hot_cache, kv_contract, measure
from glm52_engine.runtime.measures import Measures
from glm52_engine.runtime.preflight import check_memory, memory_limit
from glm52_engine.runtime.progress import ProgressLines
from glm52_engine.schedule import blocks_for

Say = Callable[[str], None]

CPU = torch.device("cpu")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostParts:
    """`devices`: where each rank of the host computes. `executor`: of the host's rank of that place, counted from 0, on
    its lane to the others; called once, by the rank's thread. `pool_seconds`: that the pools took to get their memory
    and, for GPUs, to be pinned. `abandon`: a rank has failed, and those of this host that wait for it end. `close` lets
    go of what is pinned, when nobody uses it any more."""

    measures: Measures
    pools: list[Pool]
    layout: dict[str, str | int]
    devices: Sequence[torch.device]
    executor: Callable[[int, Lane], LockStep]
    pool_seconds: float = 0.0
    abandon: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


def read_terms(config: EngineConfig, role: Role, hosts: tuple[int, ...], phases: Phases) -> tuple[Measures, Terms]:
    """What the hosts of a replica compare, read from the checkpoint's headers. Raises ConfigError."""
    path = Path(config.model.path)
    with phases.phase("reading the checkpoint's headers"):
        measures = measure(path, Options.of(config, role))
        fingerprint = read_fingerprint(path, measures.spec)
    limits = measures.limits
    terms = Terms(
        fingerprint=fingerprint,
        hosts=hosts,
        block_size=limits.block_size,
        block_bytes=measures.kv.block_bytes,
        blocks=limits.blocks,
        seats=limits.seats,
        max_model_len=limits.max_model_len,
        step_tokens=measures.step.budget,
    )
    return measures, terms


def load_host(
    config: EngineConfig, role: Role, measures: Measures, span: RankSpan, world: int, phases: Phases, say: Say
) -> HostParts:
    """Blocking. Raises ConfigError for what can never work."""
    spec, path = measures.spec, Path(config.model.path)
    experts = experts_of(span.ranks, world=world, experts=spec.n_routed_experts)
    check_memory(
        config.role(role),
        weights=weight_bytes(spec, experts=experts),
        accelerator=config.accelerator,
        limit=memory_limit(),
    )
    if config.accelerator == "cpu":
        return _on_host(path, measures, span, experts, phases, say)
    return _on_gpus(path, measures, config.role(role), span, world, phases, say)


def _on_host(path: Path, measures: Measures, span: RankSpan, experts: range, phases: Phases, say: Say) -> HostParts:
    """All ranks compute with the same weights, which lie on the files' pages."""
    spec, limits = measures.spec, measures.limits

    def weights() -> Weights:
        with phases.phase("reading weights"):
            return load_weights(path, spec, experts=experts, on_progress=ProgressLines("reading weights", say))

    def pools() -> tuple[list[Pool], float]:
        began = time.monotonic()
        with phases.phase("touching the pools"):
            made = [Pool(measures.kv, limits.blocks) for _ in span.ranks]
            for pool in made:
                pool.touch()
        return made, time.monotonic() - began

    with ThreadPoolExecutor(2, thread_name_prefix="load") as threads:
        reading, touching = threads.submit(weights), threads.submit(pools)
        loaded = reading.result()
        touched, seconds = touching.result()

    def executor(place: int, lane: Lane) -> LockStep:
        moes: list[ShardedMoe] = []

        def sharded(spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> ShardedMoe:
            moes.append(ShardedMoe(spec, weights, lane))
            return moes[-1]

        pool = touched[place]
        return ShardedExecutor(
            Model(spec, loaded.tensors, moe=sharded), moes, lane, pool, limits=measures.step, seats=limits.seats,
            blocks_per_seat=blocks_for(limits.max_model_len, limits.block_size), hot=hot_cache(measures, pool),
        )  # fmt: skip

    contract = kv_contract(measures.kv, loaded)
    return HostParts(measures, touched, contract, [CPU] * span.rank_count, executor, seconds)


def _on_gpus(
    path: Path, measures: Measures, role: RoleConfig, span: RankSpan, world: int, phases: Phases, say: Say
) -> HostParts:
    """A GPU for each rank, with that rank's experts only. Ranks are counted from 0 here, as this pod's GPUs are."""
    # They import the kernels.
    from glm52_engine.ranks.device import ShardedDeviceExecutor
    from glm52_engine.runtime.device import gpus

    spec, kv, limits, count = measures.spec, measures.kv, measures.limits, span.rank_count
    gpus.check_count(count)
    check_memlock(count * limits.blocks * kv.block_bytes)
    experts = [experts_of(range(r, r + 1), world=world, experts=spec.n_routed_experts) for r in span.ranks]
    exchanges = [LateExchange(rank, world) for rank in span.ranks]
    together, captures = Together(), Captures(count)

    def weights(place: int) -> Weights:
        told = together.progress(ProgressLines(f"reading weights for rank {span.first_rank + place}", say))
        device = gpus.device(place)
        return load_weights(path, spec, device=device, fp8="keep", experts=experts[place], on_progress=told)

    def pool(place: int) -> tuple[Pool, Pinned]:
        told = together.progress(ProgressLines(f"pinning the pool of rank {span.first_rank + place}", say))
        made, pinned = gpus.pinned_pool(place, kv, limits.blocks, told)
        failed.callback(pinned.release)
        return made, pinned

    def all_of(name: str, work: Callable[[int], T]) -> list[T]:
        with phases.phase(name):
            return together.each([functools.partial(work, place) for place in range(count)])

    def built(place: int) -> ShardedDeviceExecutor:
        return gpus.built(
            ShardedDeviceExecutor, place, measures, loaded[place], pools[place], role, pins[place].release,
            first_rank=span.first_rank, experts=experts[place], exchange=exchanges[place],
        )  # fmt: skip

    loaded: list[Weights]
    with contextlib.ExitStack() as failed:
        both: list[Callable[[], list[Any]]] = [
            lambda: all_of("reading weights", weights),
            lambda: all_of("pinning the pools", pool),
        ]
        loaded, pinned_pools = together.each(both)
        pools, pins = [made for made, _ in pinned_pools], [pinned for _, pinned in pinned_pools]
        contract = kv_contract(kv, loaded[0])
        made = all_of("putting the weights into place", built)
        failed.pop_all()

    def executor(place: int, lane: Lane) -> LockStep:
        exchanges[place].meet(lane.collectives)
        made[place].meet(lane, captures)
        return made[place]

    def close() -> None:
        for each in made:
            each.close()

    devices = [torch.device(gpus.device(place)) for place in range(count)]
    seconds = max(pinned.seconds for pinned in pins)
    return HostParts(measures, pools, contract, devices, executor, seconds, captures.abandon, close)


class _Abandoned(Exception):
    """Another thread of the same load has failed."""


class Together:
    """Threads of one load. Once one has failed the others end at their next progress: its reason is not held up by
    minutes of reading, and what was pinned is let go."""

    def __init__(self) -> None:
        self._failed = threading.Event()

    def progress(self, told: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def checked(done: int, total: int) -> None:
            if self._failed.is_set():
                raise _Abandoned
            told(done, total)

        return checked

    def each(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """All at once. When all are over raises what one of them failed with for a reason of its own."""
        with ThreadPoolExecutor(len(works), thread_name_prefix="load") as threads:
            futures: list[Future[T]] = [threads.submit(work) for work in works]
            if any(future.exception() for future in wait(futures, return_when=FIRST_EXCEPTION).done):
                self._failed.set()
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, _Abandoned)), errors[0])
        return [future.result() for future in futures]
