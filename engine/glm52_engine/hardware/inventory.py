"""Which GPU belongs to which rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm52_engine.config import ConfigError
from glm52_engine.sizing import gib


@dataclass(frozen=True, slots=True)
class Gpu:
    """`index` is NVML's; `memory` and `free` in bytes; `numa`: the node whose memory is near, None where unknown."""

    index: int
    uuid: str
    name: str
    bus: str
    memory: int
    free: int
    numa: int | None


def visible(gpus: Sequence[Gpu], devices: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order, which is CUDA's; all of them where it is not set.

    NVML knows nothing of that variable. As in CUDA an unknown entry hides itself and all that follow.
    """
    if devices is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in devices.split(",")):
        found = [gpu for gpu in gpus if entry == str(gpu.index) or (entry and gpu.uuid.startswith(entry))]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def for_ranks(gpus: Sequence[Gpu], ranks: int) -> list[Gpu]:
    """The GPU of each rank of this pod, in the order of the ranks. Raises ConfigError where there are too few."""
    if len(gpus) < ranks:
        seen = ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in gpus) or "none"
        raise ConfigError(
            f"ranks_per_host: found {ranks}, but this pod sees {len(gpus)} GPUs ({seen}) and every rank needs one: "
            "lower ranks_per_host, or ask for more GPUs"
        )
    return list(gpus[:ranks])


def describe(gpu: Gpu, rank: int) -> str:
    """One line for the log of a start."""
    near = "an unknown NUMA node" if gpu.numa is None else f"NUMA node {gpu.numa}"
    return f"rank {rank}: {gpu.name} {gpu.uuid} at {gpu.bus}, {near}, {gib(gpu.free)} of {gib(gpu.memory)} free"
