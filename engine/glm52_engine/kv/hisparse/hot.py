"""One rank's hot buffers, and what a decode step does with them between the selection of tokens and attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import ModuleType

import torch

from glm52_engine.kernels import residency as plain
from glm52_engine.kernels.residency import COUNTERS, POISON, HostRows, Plan, Residency
from glm52_engine.kv.hisparse.frames import Frames

MOST_ROWS = 32_767
"""Managed rows of a hot buffer: they are numbered in int16."""

_ROW_ALIGNMENT = 64
"""A layer's hot rows are a whole number of these, so that kernels for paged caches may read them as blocks."""


def layer_groups(indexer_types: Sequence[str]) -> tuple[range, ...]:
    """Each full layer with the shared layers that reuse its selection; raises ValueError when the first is not full."""
    starts = [layer for layer, kind in enumerate(indexer_types) if kind == "full"]
    if not starts or starts[0] != 0:
        raise ValueError("the first layer is shared: there is no selection to reuse")
    return tuple(range(a, b) for a, b in zip(starts, [*starts[1:], len(indexer_types)], strict=True))


class HotPool:
    """Hot buffers of all seats and layers, and their residency. Outlives steps; its tensors never move.

    `rows` managed rows a seat and layer, at least `top_k`; one more holds the newest token's KV. `form`: the module
    whose functions are used; by default Triton's on a GPU, else PyTorch's. `debug`: host rows that nobody has written
    are poisoned, and counted when they are read.

    `longest`: blocks of the longest context; given, contexts lie whole in the same memory as long as they fit (see
    `Frames`), and `frames` int32 [seats, longest] says where. Steps differ then: `HotStep.begin` or `begin_whole`.
    """

    def __init__(
        self, host: HostRows, groups: Sequence[range], *, seats: int, top_k: int, rows: int,
        device: torch.device | str, longest: int | None = None, debug: bool = False, form: ModuleType | None = None,
    ) -> None:  # fmt: skip
        if not top_k <= rows <= MOST_ROWS:
            raise ValueError(f"a hot buffer of {rows} rows; expected index_topk ({top_k}) to {MOST_ROWS}")
        self.host, self.groups, self.top_k, self.debug = host, tuple(groups), top_k, debug
        self.device = torch.device(device)
        self.form = form or _form(self.device)
        if self.form is not plain and (host.row_bytes % 16 or host.tensor.shape[1] % 16):
            raise ValueError(
                f"rows of {host.row_bytes}, blocks of {host.tensor.shape[1]} bytes; kernels expect multiples of 16"
            )
        self.residency = Residency.empty(
            groups=len(self.groups), seats=seats, rows=rows, slots=host.slots, device=self.device
        )
        count = -(-(seats * self.residency.stride + 1) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self.hot = torch.zeros(self.groups[-1].stop, count, host.row_bytes, dtype=torch.uint8, device=self.device)
        # The last row takes what no row is for.
        self._books = Frames(0 if longest is None else (count - 1) // host.block_size)
        self._blocks: dict[int, tuple[int, ...]] = {}
        self._awaited: dict[int, int] = {}
        self.frames = torch.zeros(seats, longest or 0, dtype=torch.int32, device=self.device)
        cuda = self.device.type == "cuda"
        self.copies = torch.cuda.Stream(self.device) if cuda else None
        self._told = torch.zeros_like(self.residency.counters, device="cpu", pin_memory=cuda)
        if debug:
            host.tensor.fill_(POISON)

    @property
    def whole(self) -> bool:
        """Whether contexts lie whole in frames now. Changes in `assign` and `settle` only: never under a step."""
        return self._books.whole

    @property
    def seated(self) -> Collection[int]:
        """Seats that have a sequence."""
        return self._books.seated

    @property
    def switches(self) -> int:
        return self._books.switches

    @property
    def frames_used(self) -> tuple[int, int]:
        """Frames that hold contexts, and frames in all."""
        return self._books.used, self._books.count

    def assign(self, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
        """A sequence takes the seat and the blocks, the KV of its first `arrived` tokens being in them.

        To be called before the first step that has the seat. Whatever the seat's hot buffer held is another request's,
        and what any buffer holds of these blocks has other bytes now.
        """
        if self.debug:
            self.poison(blocks, arrived)
        before = self.whole
        self._books.take(seat, len(blocks))
        self._blocks[seat] = tuple(blocks)
        if self.whole:
            self._place(seat)
            # Brought in `settle`: of many that come between two steps, the last may be the one too many for all.
            self._awaited[seat] = arrived
        elif before:
            self._awaited.clear()
            # Nothing was kept up while contexts lay whole, and their rows are where the hot ones will be.
            self.residency.owner.fill_(-1)
            self.residency.counters[COUNTERS.index("held")] = 0
        else:
            self._drop(seat, blocks)

    def release(self, seat: int) -> None:
        """The seat's sequence is over. A step under way may still write where it was; nobody gets that before."""
        self._books.leave(seat)
        self._blocks.pop(seat, None)
        self._awaited.pop(seat, None)

    def settle(self, lengths: Mapping[int, int]) -> bool:
        """Before a step: contexts lie whole again if they may, True when that has changed; or new ones are brought.

        lengths: tokens with KV in host memory of the seats that take part; if some seat is missing, nothing changes.
        """
        if not self._books.can_return(lengths.keys()):
            for seat, arrived in self._awaited.items():
                self.bring(seat, 0, arrived)
            self._awaited.clear()
            return False
        self._books.bring_back()
        for seat in self._books.seated:
            self._place(seat)
            self.bring(seat, 0, lengths[seat])
        return True

    def bring(self, seat: int, first: int, end: int) -> None:
        """Copy the rows of a seat's tokens [first, end) of every layer from host memory to its frames."""
        if end <= first:
            return
        size = self.host.block_size
        at = torch.arange(first, end, device=self.device)

        def numbers(of: Sequence[int]) -> torch.Tensor:
            known = torch.tensor(of, dtype=torch.int64).to(self.device)
            return (known[at // size] * size + at % size).int()

        plan = Plan.empty(batch=0, top_k=0, groups=1, device=self.device)
        plan = dataclasses.replace(plan, slots=numbers(self._blocks[seat]), rows=numbers(self._books.of(seat)))
        plan.count.fill_(end - first)
        self.form.gather(self.residency, 0, plan, self.host, self.hot, range(len(self.hot)), debug=self.debug)

    def _place(self, seat: int) -> None:
        frames = torch.tensor(self._books.of(seat), dtype=torch.int32)
        self.frames[seat, : len(frames)] = frames.to(self.device)

    def _drop(self, seat: int, blocks: Sequence[int]) -> None:
        """Hot copies of the seat, and of the blocks in any seat."""
        residency = self.residency
        residency.counters[COUNTERS.index("held")] -= (residency.owner[:, seat] >= 0).sum()
        residency.owner[:, seat] = -1
        ids = torch.tensor(blocks, dtype=torch.int64).to(self.device)
        where = residency.where[:, : self.host.slots].unflatten(1, (-1, self.host.block_size))
        where[:, ids] = -1

    def rows(self, layer: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """[rows, row elements]: a layer's hot rows, those of one seat side by side."""
        return self.hot[layer].view(dtype)

    def counters(self) -> dict[str, int]:
        """By `COUNTERS`, as of the last step that has ended; waits for nothing."""
        return dict(zip(COUNTERS, self._told.tolist(), strict=True))

    def tell(self) -> None:
        """Enqueue what makes `counters` new."""
        self._told.copy_(self.residency.counters, non_blocking=True)

    def poison(self, blocks: Sequence[int], written: int) -> None:
        """For debug mode: nobody has written the rows of these blocks behind their first `written` tokens."""
        size = self.host.block_size
        for layer in range(self.groups[-1].stop):
            rows = self.host.layer(layer)
            for index, block in enumerate(blocks):
                rows[block, max(0, written - index * size) :] = POISON


class HotStep:
    """A decode step's way through the hot buffers, for exactly `batch` rows. Every call only enqueues.

    A step calls `begin`, or `begin_whole` where the pool's contexts lie whole, then `fetch` for layer after layer, each
    time when the layer's new rows are in their places (`newest`) and before its attention, then `end`.
    `attended`, behind a layer's attention, is what makes fetches overlap compute: without it each layer waits for its
    own rows.
    """

    def __init__(self, pool: HotPool, batch: int) -> None:
        self._pool = pool
        self._plan = Plan.empty(batch=batch, top_k=pool.top_k, groups=len(pool.groups), device=pool.device)
        self._seats = self._active = self._own = torch.empty(0, dtype=torch.int32)
        self._arrived: dict[int, torch.cuda.Event | None] = {}
        self._written: torch.cuda.Event | None = None
        self._whole = False

    @property
    def newest(self) -> torch.Tensor:
        """int32 [T]: row of the layers' hot tensors for the KV of each row's own token; -1: padding, write nothing."""
        return self._plan.newest

    def begin(self, seats: torch.Tensor, own: torch.Tensor, active: torch.Tensor) -> None:
        """seats, own int32 [T]: seat and own KV slot of each row; active int32 []. Read during the whole step."""
        self._whole = False
        self._seats, self._own, self._active = seats, own, active
        self._pool.form.begin(self._pool.residency, seats, active, self._plan)

    def begin_whole(
        self, frames: torch.Tensor, positions: torch.Tensor, own: torch.Tensor, active: torch.Tensor
    ) -> None:
        """frames int32 [T, blocks]: each row's of the pool's `frames`; positions int64 [T]: of the rows' own tokens."""
        self._whole = True
        self._own, self._active = own, active
        self._pool.form.begin_whole(frames, positions, active, self._plan, block_size=self._pool.host.block_size)

    def fetch(self, layer: int, selected: torch.Tensor) -> torch.Tensor:
        """int32 [T, K]: where attention finds the selected tokens in the layer's hot rows, in the same order.

        selected int32 [T, K]: KV slots, -1 for none; a shared layer is given those of its full layer. Where contexts
        lie whole, the indexer has selected by `frames`, and nothing is left to find.
        """
        pool, plan = self._pool, self._plan
        if self._whole:
            pass
        elif layer in self._arrived:
            self._wait(self._arrived.pop(layer))
        else:
            group = self._group(layer)
            if layer == pool.groups[group].start:
                pool.form.resolve(pool.residency, group, self._seats, selected, self._own, self._active, plan)
            self._gather(group, layer, beside=False)
        if layer == pool.groups[-1].stop - 1:
            self._written = self._aside(self._write_back)
        return selected if self._whole else plan.resident

    def attended(self, layer: int) -> None:
        """The layer's attention is enqueued: beside what follows it, the rows of the next shared layer come.

        Not sooner: attention is one wave of programs that need a multiprocessor each, and those that fetch would be
        taken from it, which doubles its time.
        """
        group = self._group(layer)
        if not self._whole and layer + 1 in self._pool.groups[group]:
            self._arrived[layer + 1] = self._aside(partial(self._gather, group, layer + 1, beside=True))

    def end(self) -> None:
        """What follows finds the new rows in host memory."""
        self._wait(self._written)

    def _group(self, layer: int) -> int:
        return next(number for number, layers in enumerate(self._pool.groups) if layer in layers)

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._pool.device).wait_event(event)

    def _gather(self, group: int, layer: int, *, beside: bool) -> None:
        pool = self._pool
        layers = range(layer, layer + 1)
        pool.form.gather(
            pool.residency, group, self._plan, pool.host, pool.hot, layers, debug=pool.debug, beside=beside
        )

    def _write_back(self) -> None:
        pool = self._pool
        layers = range(pool.groups[-1].stop)
        pool.form.write_back(self._plan, self._own, self._active, pool.host, pool.hot, layers)
        pool.tell()

    def _aside(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        """Enqueue on the stream of copies, behind what was enqueued so far; the event says when it is done."""
        pool = self._pool
        if pool.copies is None:
            work()
            return None
        pool.copies.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.cuda.stream(pool.copies):
            work()
            return pool.copies.record_event()


def _form(device: torch.device) -> ModuleType:
    if device.type != "cuda":
        return plain
    # Not on a CPU: an engine there needs no Triton.
    from glm52_engine.kernels import hisparse

    return hisparse
