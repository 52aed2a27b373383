"""Where a layer's MLA rows lie during a step: in the pool itself, or with HiSparse in the seats' hot buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from glm52_engine.kernels.cache_rows import Rows, store
from glm52_engine.kernels.residency import HostRows
from glm52_engine.kv.hisparse import HotPool, HotStep, layer_groups
from glm52_engine.kv.pools import KvLayout, Pool, mla_rows
from glm52_engine.model.indexer import Selection
from glm52_engine.model.step import Step


class LayerRows(Protocol):
    """One layer's rows in one step."""

    def store(self, x: torch.Tensor) -> None:
        """The step's own rows, [T, mla_row]."""
        ...

    def find(self, selection: Selection) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """Rows [blocks, rows of a block, mla_row], and in which block and where in it each selected token's row lies,
        int64 [T, K]; where there is none, a row that is the token's own."""
        ...


class PoolRows:
    """`LayerRows` in the pool."""

    def __init__(self, rows: Rows, step: Step) -> None:
        self._rows, self._step = rows, step

    def store(self, x: torch.Tensor) -> None:
        store(self._rows, self._step.blocks, self._step.offsets, x)

    def find(self, selection: Selection) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        return self._rows, selection.blocks, selection.offsets


class HotCache:
    """HiSparse on the CPU: the code that serves a GPU's hot buffers, for a pool in the same memory.

    It saves nothing here. It is there so that every request that runs on a CPU shows whether hot buffers serve what the
    pool holds. `rows` of a hot buffer, at least `top_k`; `longest`: see `HotPool`.
    """

    def __init__(
        self, layout: KvLayout, pool: Pool, indexer_types: Sequence[str], *, top_k: int, seats: int, rows: int,
        longest: int | None = None, debug: bool = False,
    ) -> None:  # fmt: skip
        host = HostRows(pool.tensor, layout.block_size, layout.mla_row_bytes)
        groups = layer_groups(indexer_types)
        self.pool = HotPool(
            host, groups, seats=seats, top_k=top_k, rows=rows, device="cpu", longest=longest, debug=debug
        )
        self._step = HotStep(self.pool, seats)
        self._rows = [mla_rows(layout, self.pool.rows(layer).unsqueeze(0)) for layer in range(layout.layers)]
        self._block_size = layout.block_size
        self._seats = torch.zeros(seats, dtype=torch.int32)
        self._own = torch.zeros(seats, dtype=torch.int32)
        self._active = torch.zeros((), dtype=torch.int32)
        self._selected = torch.full((seats, top_k), -1, dtype=torch.int32)
        self._positions = torch.zeros(seats, dtype=torch.int64)
        self._brought = [0] * seats
        self._frames: torch.Tensor | None = None

    def assign(self, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
        """See `HotPool.assign`."""
        self.pool.assign(seat, blocks, arrived=arrived)
        self._brought[seat] = arrived

    def begin(self, step: Step) -> list[LayerRows]:
        """Of every layer. The step has no chunks, and no seat twice."""
        count = len(step.tokens)
        self._seats[:count] = step.seats
        self._own[:count] = step.blocks * self._block_size + step.offsets
        self._active.fill_(count)
        self._positions[:count] = step.positions
        before = dict(zip(step.seats.tolist(), step.positions.tolist(), strict=True))
        if self.pool.settle(before):
            self._brought = [before.get(seat, 0) for seat in range(len(self._brought))]
        if self.pool.whole:
            self._catch_up(before)
            frames = self.pool.frames[self._seats.long()]
            self._frames = frames[:count]
            self._step.begin_whole(frames, self._positions, self._own, self._active)
        else:
            self._frames = None
            self._step.begin(self._seats, self._own, self._active)
        return [_HotRows(self, layer, count) for layer in range(len(self._rows))]

    def _catch_up(self, before: Mapping[int, int]) -> None:
        """Rows that steps with prompts have put into the pool, past the frames."""
        for seat, length in before.items():
            if seat in self.pool.seated:
                self.pool.bring(seat, self._brought[seat], length)
            self._brought[seat] = length + 1

    def end(self) -> None:
        """The step's own rows are in the pool."""
        self._step.end()

    def store(self, layer: int, x: torch.Tensor) -> None:
        at = self._step.newest[: len(x)].long()
        store(self._rows[layer], torch.zeros_like(at), at, x)

    def find(self, layer: int, selection: Selection) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        where = selection.blocks
        if self._frames is not None:
            where = self._frames.gather(1, selection.positions.clamp(min=0) // self._block_size)
        slots = torch.where(selection.missing, -1, where * self._block_size + selection.offsets)
        count, width = slots.shape
        self._selected[:count].fill_(-1)
        self._selected[:count, :width] = slots
        resident = self._step.fetch(layer, self._selected)[:count, :width].long()
        resident = torch.where(resident < 0, self._step.newest[:count, None], resident)
        return self._rows[layer], torch.zeros_like(resident), resident


class _HotRows:
    def __init__(self, cache: HotCache, layer: int, count: int) -> None:
        self._cache, self._layer, self._count = cache, layer, count

    def store(self, x: torch.Tensor) -> None:
        self._cache.store(self._layer, x)

    def find(self, selection: Selection) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        return self._cache.find(self._layer, selection)
