"""What a start spends its time on. Phases overlap: each has its own beginning and end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from glm52_engine.ranks.messages import Phase


class Phases:
    """Of one process; times are seconds since it began. `told` is called on whatever thread ends a phase."""

    def __init__(self, told: Callable[[Phase], None] = lambda phase: None) -> None:
        self.done: list[Phase] = []
        self._told = told
        self._origin = time.monotonic() - process_age()

    def now(self) -> float:
        return time.monotonic() - self._origin

    def note(self, name: str, began: float) -> None:
        phase = Phase(name, round(began, 3), round(self.now(), 3))
        self.done.append(phase)
        self._told(phase)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One that fails is not noted: its time says nothing."""
        began = self.now()
        yield
        self.note(name, began)


def process_age() -> float:
    """Seconds since the kernel started this process, its imports included; 0 where nothing tells."""
    try:
        # Behind the name, which may hold anything: the 20th field is the start in clock ticks since boot.
        started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
