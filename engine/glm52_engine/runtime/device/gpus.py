"""What a rank needs of its GPU, asked before it is taken. Imports the kernels, so only where there is a GPU."""

from __future__ import annotations

import torch

from glm52_engine.checkpoint import ModelSpec, Weights
from glm52_engine.config import ConfigError, RoleConfig
from glm52_engine.kv.pools import Pool
from glm52_engine.model.device import device_weights
from glm52_engine.runtime.device.executor import DeviceExecutor
from glm52_engine.runtime.rank import StepLimits
from glm52_engine.schedule import Limits, blocks_for
from glm52_engine.sizing import gib


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


def check_room(rank: int, pool: Pool, role: RoleConfig) -> None:
    """Raises ConfigError when the device's copy of the pool does not fit beside the weights that are there already."""
    free, total = torch.cuda.mem_get_info(device(rank))
    usable = free - total * (100 - role.gpu_memory_percent) // 100
    need = pool.num_blocks * pool.block_bytes
    if need > usable:
        raise ConfigError(
            f"host_pool_gib: found {role.host_pool_gib}: the GPU of rank {rank} keeps the same blocks, {gib(need)}, "
            f"but of its {gib(total)} it has {gib(max(0, usable))} left beside the weights at gpu_memory_percent "
            f"{role.gpu_memory_percent}: lower host_pool_gib"
        )


def executor(
    rank: int, spec: ModelSpec, weights: Weights, pool: Pool, role: RoleConfig, limits: Limits, step: StepLimits
) -> DeviceExecutor:
    on_device = device_weights(spec, weights, device(rank))
    torch.cuda.empty_cache()  # the tensors that were joined: the room is asked for next
    check_room(rank, pool, role)
    pin(pool)
    return DeviceExecutor(
        on_device,
        pool,
        seats=limits.seats,
        blocks_per_seat=blocks_for(limits.max_model_len, limits.block_size),
        vocab_bound=step.vocab_bound,
        step_tokens=step.budget,
    )


def pin(pool: Pool) -> None:
    """Registers the pool's pages with the driver, so that copies run beside the compute; raises ConfigError."""
    code = torch.cuda.cudart().cudaHostRegister(pool.tensor.data_ptr(), pool.tensor.nbytes, 0)
    if int(code):
        raise ConfigError(
            f"host_pool_gib: {gib(pool.tensor.nbytes)} cannot be pinned ({code}): raise the memlock limit of the "
            "container (ulimit -l), or lower host_pool_gib"
        )


def unpin(pool: Pool) -> None:
    torch.cuda.cudart().cudaHostUnregister(pool.tensor.data_ptr())
