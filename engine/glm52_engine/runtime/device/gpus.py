"""What a rank needs of its GPU, asked before it is taken. Imports the kernels, so only where there is a GPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from glm52_engine.checkpoint import Weights
from glm52_engine.config import ConfigError, RoleConfig
from glm52_engine.kv.pinning import Cuda, Pinned, gpu_place, host_slab, pin
from glm52_engine.kv.pools import KvLayout, Pool
from glm52_engine.model.device_weights import device_weights
from glm52_engine.model.exchange import Exchange
from glm52_engine.model.sparse_pool import device_bytes
from glm52_engine.runtime.device.executor import DeviceExecutor
from glm52_engine.runtime.device.room import Room
from glm52_engine.runtime.measures import Measures
from glm52_engine.schedule import blocks_for
from glm52_engine.sizing import gib

log = logging.getLogger(__name__)


def device(rank: int) -> str:
    return f"cuda:{rank}"


def check_count(ranks: int) -> None:
    """Raises ConfigError unless every rank of this pod has a GPU of its own."""
    seen = torch.cuda.device_count()
    if seen < ranks:
        raise ConfigError(
            f"ranks_per_host: found {ranks}, but this pod sees {seen} GPUs and every rank needs one: lower "
            "ranks_per_host, ask for more GPUs, or set accelerator to cpu"
        )


def check_room(rank: int, pool: Pool, role: RoleConfig, hot_rows: int | None, *, first_rank: int = 0) -> int:
    """Bytes of the KV that the device keeps. Raises ConfigError when they do not fit beside the weights there.

    `rank` of this pod, whose ranks are numbered from `first_rank` on in its replica.
    """
    free, total = torch.cuda.mem_get_info(device(rank))
    usable = free - total * (100 - role.gpu_memory_percent) // 100
    if hot_rows is None:
        need = pool.num_blocks * pool.block_bytes
        keeps, remedy = f"the same blocks, {gib(need)}", "lower host_pool_gib"
    else:
        hot = device_bytes(pool.layout, blocks=0, seats=role.max_num_seqs, rows=hot_rows)
        need = device_bytes(pool.layout, blocks=pool.num_blocks, seats=role.max_num_seqs, rows=hot_rows)
        keeps = (
            f"{gib(need)} = {gib(need - hot)} index keys of the same tokens + {gib(hot)} hot buffers of "
            f"{role.max_num_seqs} seats × {hot_rows} tokens"
        )
        remedy = "lower host_pool_gib, max_num_seqs or hi_sparse.device_buffer_size"
    if need > usable:
        raise ConfigError(
            f"host_pool_gib: found {role.host_pool_gib}: the GPU of rank {first_rank + rank} keeps {keeps}, "
            f"but of its {gib(total)} it has {gib(max(0, usable))} left beside the weights at gpu_memory_percent "
            f"{role.gpu_memory_percent}: {remedy}"
        )
    return need


class CountedExecutor(DeviceExecutor):
    """Says what its GPU's memory went to, also when that does not suffice."""

    room: Room

    def warm_up(self) -> None:
        with self.room.taking("graphs"):
            super().warm_up()
        log.info("GPU memory: %s of %s", self.room, gib(self.room.total))


AnyCounted = TypeVar("AnyCounted", bound=CountedExecutor)


def executor(
    rank: int, measures: Measures, weights: Weights, pool: Pool, role: RoleConfig, unpin: Callable[[], object]
) -> CountedExecutor:
    """Of a rank that computes alone."""
    return built(CountedExecutor, rank, measures, weights, pool, role, unpin)


def built(
    kind: type[AnyCounted], rank: int, measures: Measures, weights: Weights, pool: Pool, role: RoleConfig,
    unpin: Callable[[], object], *, first_rank: int = 0, experts: range | None = None, exchange: Exchange | None = None,
) -> AnyCounted:  # fmt: skip
    """`rank` and `first_rank` as in `check_room`. Of the routed experts `weights` has `experts` (None: all); the others
    are reached by the exchange. Raises ConfigError where the GPU's memory does not suffice."""
    limits, step = measures.limits, measures.step
    narrow(weights)
    on_device = device_weights(measures.spec, weights, device(rank), experts)
    torch.cuda.empty_cache()  # the tensors that were joined: the room is asked for next
    room = Room(first_rank + rank, functools.partial(torch.cuda.mem_get_info, device(rank)))
    kv = check_room(rank, pool, role, measures.hot_rows, first_rank=first_rank)
    with room.taking("workspace", of_it=("KV", kv)):
        made = kind(
            on_device,
            pool,
            seats=limits.seats,
            blocks_per_seat=blocks_for(limits.max_model_len, limits.block_size),
            vocab_bound=step.vocab_bound,
            step_tokens=step.budget,
            unpin=unpin,
            hot_rows=measures.hot_rows,
            hot_always=measures.hot_always,
            exchange=exchange,
        )
    made.room = room
    return made


def narrow(weights: Weights) -> None:
    """To bfloat16, as other engines do with a float32 checkpoint: the kernels' tiles are made for it.

    Only biases of the experts' choice stay as they are, which every checkpoint has in float32.
    """
    wide = [
        name
        for name, tensor in weights.tensors.items()
        if tensor.dtype == torch.float32 and not name.endswith("e_score_correction_bias")
    ]
    for name in wide:
        weights.tensors[name] = weights.tensors[name].bfloat16()
    if wide:
        log.info("the checkpoint is float32; it computes in bfloat16 on this GPU")


def pinned_pool(rank: int, kv: KvLayout, blocks: int, on_progress: Callable[[int, int], None]) -> tuple[Pool, Pinned]:
    """Host memory of a rank, near its GPU and pinned for it. Raises ConfigError."""
    slab = host_slab(blocks * kv.block_bytes)
    pinned = pin(slab, Cuda(rank), place=gpu_place(rank), on_progress=on_progress)
    return Pool(kv, blocks, slab), pinned
