"""How far a long piece of a start has come, in words."""

from __future__ import annotations

from collections.abc import Callable

from glm52_engine.sizing import gib

_LEAST_BYTES = 256 << 20
"""Between two lines: a second of a slow volume."""


class ProgressLines:
    """Bytes done of a total → a line for people at every twentieth, but none for what takes no time."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._next = 0

    def __call__(self, done: int, total: int) -> None:
        step = max(total // 20, _LEAST_BYTES)
        if self._next == 0:
            self._next = step
        if done >= self._next:
            self._next = done - done % step + step
            self._say(f"{self._what}: {100 * done // total} % of {gib(total)}")
