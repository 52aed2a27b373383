"""Ranks of one replica as threads that take turns: one computes at a time, since Triton's interpreter has one state.

What crosses is a copy, made while all ranks stand at the collective. Padding is NaN on its way, and so is all memory
that is taken and not written: whoever reads either is found out by its own result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from glm52_engine.ranks.spans import experts_of

T = TypeVar("T")
SECONDS = 120.0


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written holds NaN, in integers the greatest there is."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Together:
    """`dim`, `top`: of the float32 rows that travel, so that those that choose nobody are known."""

    def __init__(self, world: int, *, dim: int, top: int) -> None:
        self.world, self._dim, self._top = world, dim, top
        self._turn = threading.Lock()
        self._meeting = threading.Barrier(world, timeout=SECONDS)
        self._brought: list[torch.Tensor] = [torch.empty(0)] * world
        self.calls: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(world)]
        self.sent = [0] * world
        """Rows of each rank that chose anybody."""

    def each(self, work: Callable[[Rank], T]) -> list[T]:
        """`work(rank's exchange)` on all ranks at once."""

        def run(number: int) -> T:
            with self._turn:
                try:
                    return work(Rank(self, number))
                except BaseException:
                    self._meeting.abort()
                    raise

        with ThreadPoolExecutor(self.world) as threads:
            futures = [threads.submit(run, number) for number in range(self.world)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        # The others' only says that somebody is missing.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def meet(self, rank: int, name: str, brought: torch.Tensor) -> list[torch.Tensor]:
        self.calls[rank].append((name, tuple(brought.shape)))
        self._brought[rank] = brought.clone()
        self._wait()
        found = list(self._brought)
        self._wait()
        assert len({(tensor.shape, tensor.dtype) for tensor in found}) == 1
        return found

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._meeting.wait()
        finally:
            self._turn.acquire()

    def poison(self, rank: int, rows: torch.Tensor) -> torch.Tensor:
        nobody = (rows.view(torch.int32)[:, self._dim : self._dim + self._top] == -1).all(1)
        self.sent[rank] += int((~nobody).sum())
        return torch.where(nobody[:, None], 0xFF, rows)


class Rank:
    """An `Exchange`."""

    def __init__(self, together: Together, rank: int) -> None:
        self.rank, self.world, self._together = rank, together.world, together

    def gather(self, own: torch.Tensor, everyone: torch.Tensor) -> None:
        assert own.is_contiguous()
        assert everyone.is_contiguous()
        found = self._together.meet(self.rank, "gather", self._together.poison(self.rank, own))
        everyone.copy_(torch.stack(found))

    def swap(self, parts: torch.Tensor, back: torch.Tensor) -> None:
        assert parts.is_contiguous()
        assert back.is_contiguous()
        found = self._together.meet(self.rank, "swap", parts)
        back.copy_(torch.stack([part[self.rank] for part in found]))

    def experts(self, count: int) -> range:
        return experts_of(range(self.rank, self.rank + 1), world=self.world, experts=count)
