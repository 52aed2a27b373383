"""Finds stop strings in text that comes in pieces; the pieces' borders never change the result. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Text up to the first stop string, which `include` keeps. Holds back only what may be the start of one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.hit: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, armed: bool = True) -> str:
        """Text that is safe to send now. Without `armed` a stop string that becomes complete in `text` is none."""
        if self.hit is not None:
            return ""
        held, self._held = self._held + text, ""
        for place, character in enumerate(text, start=len(held) - len(text) + 1):
            # Of several stops the one that is complete first wins, of those complete at once the longest.
            complete = [automaton.stop for automaton in self._automata if automaton.accepts(character)]
            if complete and armed:
                self.hit = max(complete, key=len)
                return held[:place] if self._include else held[: place - len(self.hit)]
        safe = len(held) - max((automaton.matched for automaton in self._automata), default=0)
        self._held = held[safe:]
        return held[:safe]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


class _Automaton:
    """Knuth-Morris-Pratt: how much of `stop` the text ends with, whatever the length of either."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._back = [0]
        for size in range(1, len(stop)):
            back = self._back[-1]
            while back and stop[size] != stop[back]:
                back = self._back[back - 1]
            self._back.append(back + (stop[size] == stop[back]))

    def accepts(self, character: str) -> bool:
        """Whether this character completes the stop string; `matched` is then what a next one may begin with."""
        while self.matched and character != self.stop[self.matched]:
            self.matched = self._back[self.matched - 1]
        self.matched += character == self.stop[self.matched]
        complete = self.matched == len(self.stop)
        if complete:
            self.matched = self._back[-1]
        return complete
