"""Refuses a start that its own memory limit cannot hold, before anything is allocated."""

from __future__ import annotations

from pathlib import Path

from glm52_engine.config import ConfigError, EngineConfig, Role
from glm52_engine.sizing import gib, host_memory

NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes this container may use (cgroup v2, then v1), or None without a limit; never the node's memory."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < NO_LIMIT:
            return int(text)
        return None
    return None


def check_memory(config: EngineConfig, role: Role, limit: int | None) -> None:
    need = host_memory(config.role(role), weights_gib=config.model.weights_gib)
    if limit is not None and need.per_host > limit:
        raise ConfigError(
            f"{role} needs {need.explain()}, but this container's memory limit is {gib(limit)}: "
            f"raise the limit to {gib(need.per_host)}, or lower {role}.host_pool_gib or {role}.ranks_per_host"
        )
