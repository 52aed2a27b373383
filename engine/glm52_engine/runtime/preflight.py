"""Whether this pod's memory limit can hold what the engine is about to allocate: asked before, not found out after."""

from __future__ import annotations

from pathlib import Path

from glm52_engine.config import Accelerator, ConfigError, RoleConfig
from glm52_engine.runtime.cgroups import MEMBERSHIP, ROOT, limit_files
from glm52_engine.sizing import GIB, gib, host_memory

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


def memory_limit(*, root: Path = ROOT, membership: Path = MEMBERSHIP) -> tuple[int, Path] | None:
    """The smallest limit in bytes of this process's memory cgroup and its ancestors, and its file; None without one.

    The node's memory is not the answer: a pod that believes it dies of its own limit half-way through its pools.
    """
    files = limit_files("memory", "memory.max", "memory.limit_in_bytes", root=root, membership=membership)
    found = [(value, file) for file in files if (value := _read_limit(file)) is not None]
    return min(found) if found else None


def check_memory(role: RoleConfig, *, weights: int, accelerator: Accelerator, limit: tuple[int, Path] | None) -> None:
    """`weights` in bytes. Raises ConfigError with the sum written out when it exceeds the limit."""
    need = host_memory(role, weights_gib=-(-weights // GIB), accelerator=accelerator)
    if limit is not None and need.per_host > limit[0]:
        raise ConfigError(
            f"this pod needs {need.explain()}, but its memory limit is {gib(limit[0])} ({limit[1]}): "
            f"raise the limit by {gib(need.per_host - limit[0])}, or lower host_pool_gib or ranks_per_host"
        )


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None
