"""A hot buffer by hand, one request at a time, and a rank's worth of HiSparse state to hold against it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import ModuleType

import torch

from glm52_engine.kernels.residency import HostRows, Plan, Residency

BLOCK, ROW = 4, 32


class Naive:
    """One seat's hot buffer of one full layer: KV slots from the one used the longest ago to the newest."""

    def __init__(self, rows: int, slots: int = 1 << 30) -> None:
        self.slots = slots
        self.held: list[int | None] = [None] * rows

    def step(self, selected: Sequence[int], own: int) -> set[int]:
        """The slots that have to be fetched; -1 stands for those that are none."""
        self.drop({own})
        asked = [slot for slot in selected if slot >= 0 and slot != own]
        missing: list[int | None] = [slot if slot < self.slots else None for slot in asked if slot not in self.held]
        hits = [slot for slot in self.held if slot in asked]
        stale = [slot for slot in self.held if slot not in asked]
        self.held = [*stale[len(missing) :], *missing, *hits]
        return {-1 if slot is None else slot for slot in missing}

    def drop(self, slots: Collection[int]) -> None:
        """These slots get other bytes."""
        self.held = [None if slot in slots else slot for slot in self.held]


class World:
    """State, host rows and hot buffers of a rank; `form` is the module whose functions work on them."""

    def __init__(
        self, form: ModuleType, *, device: str, seats: int = 3, top_k: int = 6, rows: int = 9, blocks: int = 12,
        groups: int = 2, layers: int = 5, batch: int = 4, row_bytes: int = ROW,
    ) -> None:  # fmt: skip
        self.form, self.device = form, device
        padding = 48
        host = torch.empty(blocks, BLOCK * layers * row_bytes + padding, dtype=torch.uint8)
        self.host = HostRows(host.pin_memory() if device == "cuda" else host, BLOCK, row_bytes)
        # Never the bytes of a row that nobody has written.
        self.host.tensor.random_(0, 255)
        slots = blocks * BLOCK
        self.residency = Residency.empty(groups=groups, seats=seats, rows=rows, slots=slots, device=device)
        self.plan = Plan.empty(batch=batch, top_k=top_k, groups=groups, device=device)
        self.hot = torch.zeros(layers, seats * self.residency.stride + 1, row_bytes, dtype=torch.uint8, device=device)
        self.batch, self.top_k = batch, top_k
        self.seats, self.own = self._ints(batch), self._ints(batch)
        self.selected = self._ints(batch, top_k)
        self.active = torch.zeros((), dtype=torch.int32, device=device)

    def begin(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Rows of a step: seat, selected slots, own slot. Padding rows keep what the step before left."""
        self.active.fill_(len(rows))
        for row, (seat, selected, own) in enumerate(rows):
            self.seats[row], self.own[row] = seat, own
            self.selected[row] = torch.tensor([*selected, *[-1] * (self.top_k - len(selected))])
        self.form.begin(self.residency, self.seats, self.active, self.plan)

    def resolve(self, group: int = 0) -> list[set[int]]:
        """The KV slots that are fetched for each row."""
        arguments = (self.seats, self.selected, self.own, self.active, self.plan)
        self.form.resolve(self.residency, group, *arguments)
        count = int(self.plan.count[group])
        found: list[set[int]] = [set() for _ in range(self.batch)]
        seat_of = {int(seat): row for row, seat in enumerate(self.seats[: int(self.active)])}
        for slot, hot in zip(self.plan.slots[:count].tolist(), self.plan.rows[:count].tolist(), strict=True):
            found[seat_of[hot // self.residency.stride]].add(slot)
        return found

    def gather(self, layers: range, group: int = 0, *, debug: bool = True) -> None:
        self.form.gather(self.residency, group, self.plan, self.host, self.hot, layers, debug=debug)

    def write_newest(self, layers: range) -> None:
        """What the attention layers do: the rows' own KV, here random, into their places."""
        for row in self.plan.newest[: int(self.active)].tolist():
            for layer in layers:
                self.hot[layer, row].random_(0, 255)

    def write_back(self, layers: range) -> None:
        self.form.write_back(self.plan, self.own, self.active, self.host, self.hot, layers)

    def order(self, seat: int, group: int = 0) -> list[int | None]:
        """What the seat's hot rows hold, oldest first."""
        at = self.residency.order[group, seat].long()
        return [slot if slot >= 0 else None for slot in self.residency.owner[group, seat][at].tolist()]

    def served(self, layer: int, row: int) -> torch.Tensor:
        """[K, row_bytes] of what attention reads; zeros where nothing is selected."""
        at = self.plan.resident[row].long()
        return torch.where((at >= 0).unsqueeze(1), self.hot[layer][at.clamp(min=0)], 0).cpu()

    def wanted(self, layer: int, row: int) -> torch.Tensor:
        """The same from host memory, and the newest row from its place."""
        slots = self.selected[row].long().cpu()
        safe = slots.clamp(0, self.host.slots - 1)
        rows = self.host.layer(layer)[safe // BLOCK, safe % BLOCK]
        newest = self.hot[layer][self.plan.newest[row].long()].cpu()
        rows = torch.where((slots == self.own[row].cpu()).unsqueeze(1), newest, rows)
        return torch.where(((slots >= 0) & (slots < self.host.slots)).unsqueeze(1), rows, 0)

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)
