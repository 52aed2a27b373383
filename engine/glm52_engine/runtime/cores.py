"""How many cores this process may use: a pod sees those of its whole node."""

from __future__ import annotations

import os
from pathlib import Path

from glm52_engine.runtime.cgroups import MEMBERSHIP, ROOT, limit_files


def usable_cores(*, root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    """The smallest of the affinity and the quotas of its cgroup and of every ancestor; 1.5 is one core and a half."""
    files = limit_files("cpu", "cpu.max", "cpu.cfs_quota_us", root=root, membership=membership)
    quotas = [quota for file in files if (quota := _quota(file)) is not None]
    return min([float(len(os.sched_getaffinity(0))), *quotas])


def _quota(file: Path) -> float | None:
    """None without one: "max" in version 2, -1 in version 1."""
    try:
        words = file.read_text().split()
        if file.name != "cpu.max":
            words.append(file.with_name("cpu.cfs_period_us").read_text())
        quota, period = map(int, words)
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
