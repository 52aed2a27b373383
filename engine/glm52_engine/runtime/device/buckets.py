"""Decode steps of fixed shape, one for each bucket of rows, captured as CUDA graphs where there is a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from glm52_engine.model.device import DecodeStep
from glm52_engine.schedule import launch_ahead


def bucket_sizes(seats: int) -> list[int]:
    """Powers of two, in ascending order, until all seats (at most `launch_ahead.MOST_ROWS`) fit one."""
    sizes = [1]
    while sizes[-1] < min(seats, launch_ahead.MOST_ROWS):
        sizes.append(2 * sizes[-1])
    return sizes


def warm_sizes(most_rows: int, longest: int, top_k: int) -> list[tuple[int, int]]:
    """(rows, context) of chunks of prompts for which every other chunk's kernels are compiled.

    Products by head differ by powers of two of the rows up to 64, the selection of `top_k` by powers of two of the
    context up to `longest`: each size is there once, and no kernel differs by both.
    """
    most = min(most_rows, longest)
    contexts = [min(longest, 1 << (top_k - 1).bit_length())]
    while contexts[-1] < longest:
        contexts.append(min(longest, 2 * contexts[-1]))
    left = [min(count, most) for count, above in ((64, 32), (32, 16)) if most > above]
    sizes = []
    for context in contexts:
        # Many rows as early as may be: the longest contexts have scores enough.
        count = next((count for count in left if count <= context), None)
        if count is not None:
            left.remove(count)
        sizes.append((count or min(2, most, context), context))
    return sizes + [(count, longest) for count in left]


class Bucket:
    """One `DecodeStep`, its graph, and the buffers in pinned memory through which the host talks to it."""

    def __init__(self, step: DecodeStep) -> None:
        self.step = step
        self.turn: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Around a capture, once the step has run: where several ranks of a process capture at the same time."""
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        cuda = step.tokens.is_cuda
        # Rows × (token, position, seat): one copy to the device for all that the host decides.
        self._given = torch.zeros(3, step.batch, dtype=torch.int64, pin_memory=cuda)
        self._sent = torch.cuda.Event() if cuda else None
        self._taken = torch.zeros(3, step.batch, dtype=torch.int64, device=step.tokens.device)
        self._done = [torch.cuda.Event() if cuda else None for _ in range(2)]
        self._turn = 0

    def capture(self, pool: Any, *, whole: bool = False) -> Any:
        """Run the step on padding rows, which compiles its kernels, then capture it; returns the graphs' pool.

        `whole`: which form of it, see `DecodeStep.run`.
        """
        self.step.active.zero_()
        self.step.run(whole=whole)
        if not self.step.tokens.is_cuda:
            with self.turn():
                self._turn = int(self.step.turn)
            return None
        torch.cuda.synchronize(self.step.tokens.device)
        graph = torch.cuda.CUDAGraph()
        # Another rank's thread may allocate memory meanwhile, which the default mode takes for an error of ours.
        with self.turn(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.step.run(whole=whole)
        self._graphs[whole] = graph
        torch.cuda.synchronize(self.step.tokens.device)
        self._turn = int(self.step.turn)
        return graph.pool()

    def load(
        self, rows: Sequence[tuple[int, int, int]], tables: torch.Tensor, frames: torch.Tensor | None = None
    ) -> None:
        """Rows of (token, position, seat) become the next step's; `tables` int32 [seats, blocks] on the device.

        `frames`: the like, where contexts lie whole in a `SparsePool`.
        """
        count, step = len(rows), self.step
        if self._sent is not None:
            self._sent.synchronize()  # the copy before may still read the buffer
        # Padding rows have seat 0 and position 0: what they read is there, and they write nothing.
        self._given.zero_()
        self._given[:, :count] = torch.tensor(rows, dtype=torch.int64).T
        self._taken.copy_(self._given, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        step.tokens.copy_(self._taken[0])
        step.positions.copy_(self._taken[1])
        step.lengths.copy_(self._taken[1] + 1)
        step.seats.copy_(self._taken[2])
        step.table.copy_(tables[self._taken[2], : step.table.shape[1]])
        if frames is not None:
            step.frames.copy_(frames[self._taken[2], : step.frames.shape[1]])
        step.active.fill_(count)

    def replay(self, *, whole: bool = False) -> int:
        """Start the step; returns which row of `chosen` will hold its tokens."""
        graph = self._graphs.get(whole)
        if graph is None:
            self.step.run(whole=whole)
        else:
            graph.replay()
        turn = self._turn = 1 - self._turn
        event = self._done[turn]
        if event is not None:
            event.record()
        return turn

    def chosen(self, turn: int) -> list[int]:
        """The tokens of every row, padding rows too; waits for the step."""
        event = self._done[turn]
        if event is not None:
            event.synchronize()
        tokens: list[int] = self.step.chosen[turn].tolist()
        return tokens
