"""Finds stop strings in text that comes in pieces; the pieces' borders never change the result. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Text up to the first stop string, which is left out itself. Holds back only what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Text that is safe to send now."""
        if self.hit:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            # Of several stops in the text the one that was complete first wins, as it would have ended the stream.
            return self._take(min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))[0], drop=True)
        return self._take(len(self._held) - self._possible_start())

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        return "" if self.hit else self._take(len(self._held))

    def _possible_start(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) - 1 for stop in self._stops), default=0))
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

    def _take(self, size: int, *, drop: bool = False) -> str:
        text, self._held = self._held[:size], "" if drop else self._held[size:]
        return text
