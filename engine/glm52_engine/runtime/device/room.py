"""What a GPU's memory goes to while a rank is built on it, so that what does not fit is told in figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from glm52_engine.config import ConfigError
from glm52_engine.sizing import gib

REMEDY = (
    "lower host_pool_gib for less KV, or max_num_seqs for fewer and smaller graphs and less workspace, or give the "
    "weights to more GPUs"
)


class Room:
    """`ask` gives (free, total) bytes of rank `rank`'s GPU. What is taken at the start is the weights'."""

    def __init__(self, rank: int, ask: Callable[[], tuple[int, int]]) -> None:
        self._rank, self._ask = rank, ask
        self._free, self.total = ask()
        self.taken = {"weights": self.total - self._free}
        """Bytes by what they are for, in the order in which they were taken."""

    def __str__(self) -> str:
        return " + ".join(f"{gib(size)} {part}" for part, size in self.taken.items())

    @contextlib.contextmanager
    def taking(self, part: str, *, of_it: tuple[str, int] | None = None) -> Iterator[None]:
        """Counts what is taken meanwhile as `part`, but for what is known of another part: its name and bytes.

        Raises ConfigError where the GPU's memory does not suffice.
        """
        free = self._free
        try:
            yield
        except torch.OutOfMemoryError as error:
            wanted = str(error).partition("Tried to allocate ")[2].partition(". ")[0]
            raise ConfigError(
                f"rank {self._rank}: the {gib(self.total)} of its GPU do not hold {self}, and then {part}"
                f"{f' (of which {gib(of_it[1])} {of_it[0]})' if of_it else ''}"
                f"{f': {wanted} more were asked for' if wanted else ''}: {REMEDY}"
            ) from error
        self._free = self._ask()[0]
        size = free - self._free
        if of_it is not None:
            known = min(of_it[1], size)
            self.taken[of_it[0]] = self.taken.get(of_it[0], 0) + known
            size -= known
        self.taken[part] = self.taken.get(part, 0) + size
