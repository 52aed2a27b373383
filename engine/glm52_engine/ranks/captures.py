"""How the ranks of one process take turns with what concerns all of its GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from glm52_engine.ranks.collectives import CollectiveError


class Captures:
    """Ranks of one process capture one after the other, and none goes on before all have.

    A capture begins by giving back cached memory of all of the process's GPUs. That fails on a GPU where another thread
    captures; and on one whose collective waits for this thread's it waits for ever.
    """

    def __init__(self, ranks: int) -> None:
        self._one = threading.Lock()
        self._all = threading.Barrier(ranks)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around a capture, by a thread whose GPU has nothing to do."""
        with self._one:
            yield
        try:
            self._all.wait()
        except threading.BrokenBarrierError:
            raise CollectiveError("another rank of this host has captured nothing") from None

    def abandon(self) -> None:
        """Whoever waits for the others ends with CollectiveError."""
        self._all.abort()
