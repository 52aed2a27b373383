"""How much of a prompt that is being computed has its KV in the host pool already."""

from __future__ import annotations

from collections.abc import Callable, Container

Landed = Callable[[], bool]
"""Whether copies that were under way at some moment have reached the host pool."""


class Landings:
    """Of the prompts that somebody asks about; nobody else pays."""

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[int, Landed]]] = {}
        self._tokens: dict[str, int] = {}

    def tokens(self, key: str, computed: int, mark: Callable[[], Landed]) -> int:
        """Leading tokens in the pool. `computed`: of which the copies were begun; `mark`: made where that is new."""
        marks = self._marks.setdefault(key, [])
        known = marks[-1][0] if marks else self._tokens.get(key, 0)
        if computed > known:
            marks.append((computed, mark()))
        # Copies run in their order: what a later mark has seen, an earlier one has too.
        while marks and marks[0][1]():
            self._tokens[key] = marks.pop(0)[0]
        return self._tokens.get(key, 0)

    def forget(self, running: Container[str]) -> None:
        """All but those."""
        for book in (self._marks, self._tokens):
            for key in [key for key in book if key not in running]:
                del book[key]
