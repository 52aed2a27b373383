"""What a start spends its time on. Phases overlap: each has its own beginning and end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Phase:
    """One that is over: `began` and `ended` are seconds since its process began."""

    name: str
    began: float
    ended: float


class Phases:
    """Of one process, as they end. `told` is called on whatever thread ends a phase."""

    def __init__(self, told: Callable[[Phase], None] = lambda phase: None) -> None:
        self.done: list[Phase] = []
        self.others: dict[str, list[Phase]] = {}
        """Those of the replica's other hosts, by where they are called, as they are told."""
        self._told = told
        self._origin = time.monotonic() - process_age()
        self._current: tuple[str, float] | None = None

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

    def enter(self, name: str) -> None:
        """Of phases that follow each other: the one before is over. The same name again goes on with it."""
        if self._current is not None and self._current[0] == name:
            return
        self.finish()
        self._current = name, self.now()

    def finish(self) -> None:
        """The last one that was entered is over."""
        current, self._current = self._current, None
        if current is not None:
            self.note(*current)


def process_age() -> float:
    """Seconds since the kernel started this process, its imports included; 0 where nothing tells."""
    try:
        # Behind the name, which may hold anything: the 20th field is the start in clock ticks since boot.
        started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0
