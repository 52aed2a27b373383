"""Progress on the terminal: one line when a phase starts, one when it ends, a sign of life in between."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HEARTBEAT_SECONDS = 15.0


class Phase:
    """One running step; `note` sets what its next sign of life says."""

    def __init__(self, title: str, now: float) -> None:
        self.title = title
        self.started = now
        self.spoke = now
        self.detail = ""

    def note(self, detail: str) -> None:
        self.detail = detail


class Progress:
    """Prints phases, which may overlap: each line names its phase and the time since the start."""

    def __init__(
        self, write: Callable[[str], object] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._running: list[Phase] = []
        self._ticker: threading.Thread | None = None

    def say(self, text: str) -> None:
        with self._lock:
            self._write(f"[{self._clock() - self._started:6.1f}s] {text}")

    @contextmanager
    def phase(self, title: str) -> Iterator[Phase]:
        phase = Phase(title, self._clock())
        self.say(f"{title} …")
        with self._lock:
            self._running.append(phase)
        self._tick_in_background()
        outcome = "failed after"
        try:
            yield phase
            outcome = "done in"
        finally:
            with self._lock:
                self._running.remove(phase)
            self.say(f"{title}: {outcome} {self._clock() - phase.started:.1f} s")

    def beat(self) -> None:
        """Say a line for each phase that has been silent for a while."""
        now = self._clock()
        with self._lock:
            silent = [phase for phase in self._running if now - phase.spoke >= HEARTBEAT_SECONDS]
        for phase in silent:
            phase.spoke = now
            detail = f": {phase.detail}" if phase.detail else ""
            self.say(f"{phase.title} … {now - phase.started:.0f} s{detail}")

    def _tick_in_background(self) -> None:
        if self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        while True:
            time.sleep(1)
            self.beat()
