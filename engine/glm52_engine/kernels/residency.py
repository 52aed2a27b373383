"""HiSparse in plain PyTorch: what each seat's hot buffer holds, which rows a step must fetch, and the fetching.

The sparse-MLA rows of the whole context lie in host memory, row by KV slot (block × block_size + offset). A seat's hot
buffer on the device holds some of them; its last row is that of the token that the step itself computes. A full layer
resolves its top-k against the hot buffer, which gives one plan; the shared layers behind it select the same tokens and
have kept the same ones, so they replay the plan on their own bytes.

No state is kept beside the tensors and no decision is made on the host. The functions are what the CPU engine runs, and
the oracle of the Triton forms in `hisparse.py`, which take the same arguments and can stand in a CUDA graph.

T rows (query tokens), K selected slots a row, S seats, H managed rows of a hot buffer, G full layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

POISON = 0xFF
"""Every byte of a host row that nobody has written, in debug mode: NaN in every format that a row may have."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Who is where. Everything is a tensor, so that a replayed graph goes on where the last one ended.

    owner int32 [G, S + 1, H]: KV slot that a hot row holds, -1 for none. order int16 [G, S + 1, H]: hot rows, the one
    that was used the longest ago first. where int16 [G, slots + 1]: hot row that last took a KV slot. used int8
    [S + 1, H]: work space of the Triton form, zero between two calls. counters int64: see `COUNTERS`. The last
    seat and the last slot take what padding rows would write.

    `where` is a hint and `owner` the truth: a row is resident only where both agree. So an entry of `where` may
    outlive its row, and an eviction need not look for the entry of what it evicts. It costs 2 bytes beside each index
    key, however many seats there are and however long their contexts may become; a table of positions for each seat
    would cost seats × longest context.
    """

    owner: torch.Tensor
    order: torch.Tensor
    where: torch.Tensor
    used: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def empty(cls, *, groups: int, seats: int, rows: int, slots: int, device: torch.device | str) -> Residency:
        return cls(
            owner=torch.full((groups, seats + 1, rows), -1, dtype=torch.int32, device=device),
            order=torch.arange(rows, dtype=torch.int16, device=device).repeat(groups, seats + 1, 1),
            where=torch.full((groups, slots + 1), -1, dtype=torch.int16, device=device),
            used=torch.zeros(seats + 1, rows, dtype=torch.int8, device=device),
            counters=torch.zeros(len(COUNTERS), dtype=torch.int64, device=device),
        )

    @property
    def seats(self) -> int:
        return self.owner.shape[1] - 1

    @property
    def rows(self) -> int:
        return self.owner.shape[2]

    @property
    def slots(self) -> int:
        return self.where.shape[1] - 1

    @property
    def stride(self) -> int:
        """Rows of one seat in a layer's hot tensor: the managed ones, then that of the newest token."""
        return self.rows + 1


COUNTERS = ("hits", "misses", "out of bounds", "fetched", "unwritten", "evicted", "held")
"""What `Residency.counters` counts since the start: rows that full layers looked for, and of all layers those that came
from host memory (`unwritten` of them in debug mode only); tokens of full layers' hot rows that made room for
others. `held` is a level: hot rows of full layers that have a token."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a full layer and the shared ones behind it do in a step.

    resident int32 [T, K]: rows of a layer's hot tensor in the order of the selection, -1 where it has none.
    slots, rows int32 [T × K]: of the first `count[group]` entries, the KV slot to fetch (-1: there is none, the row
    becomes zero) and the hot row to put it in; their order is open. count int32 [G], zeroed by `begin`.
    newest int32 [T]: row of the hot tensor for the KV of the row's own token, -1 for padding; set by `begin`.
    """

    resident: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    count: torch.Tensor
    newest: torch.Tensor

    @classmethod
    def empty(cls, *, batch: int, top_k: int, groups: int, device: torch.device | str) -> Plan:
        def full(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        count = torch.zeros(groups, dtype=torch.int32, device=device)
        return cls(full(batch, top_k), full(batch * top_k), full(batch * top_k), count, full(batch))


@dataclass(frozen=True, slots=True)
class HostRows:
    """MLA rows in host memory: uint8 [blocks, block_bytes], pinned where a GPU reads them.

    A block begins with `block_size` rows of `row_bytes` (a multiple of 16) for each layer in turn.
    """

    tensor: torch.Tensor
    block_size: int
    row_bytes: int

    @property
    def slots(self) -> int:
        return self.tensor.shape[0] * self.block_size

    def layer(self, layer: int) -> torch.Tensor:
        """uint8 [blocks, block_size, row_bytes], a view."""
        size = self.block_size * self.row_bytes
        return self.tensor[:, layer * size : (layer + 1) * size].unflatten(1, (self.block_size, self.row_bytes))


def begin(residency: Residency, seats: torch.Tensor, active: torch.Tensor, plan: Plan) -> None:
    """Before the first layer of a step: no fetches yet, and a place for each row's own KV.

    seats int32 [T]; active int32 []: rows at or behind it are padding, whatever their seat says.
    """
    there = torch.arange(len(seats), device=seats.device) < active
    plan.count.zero_()
    plan.newest.copy_(torch.where(there, seats * residency.stride + residency.rows, -1))


def begin_whole(
    frames: torch.Tensor, positions: torch.Tensor, active: torch.Tensor, plan: Plan, *, block_size: int
) -> None:
    """`begin` of a step whose contexts lie whole in frames of `block_size` hot rows: nothing will be resolved.

    frames int32 [T, blocks]: each row's, in the order of its blocks; positions int64 [T]: of the rows' own tokens.
    """
    there = torch.arange(len(positions), device=positions.device) < active
    frame = frames.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1)
    plan.newest.copy_(torch.where(there, frame * block_size + positions % block_size, -1))


def resolve(
    residency: Residency, group: int, seats: torch.Tensor, selected: torch.Tensor, own: torch.Tensor,
    active: torch.Tensor, plan: Plan,
) -> None:  # fmt: skip
    """The plan of full layer number `group`: selected KV slots → hot rows, and what to fetch into them.

    selected int32 [T, K]: distinct KV slots, -1 for none; own int32 [T]: the slot of the row's own token. Rows of one
    call have different seats. Afterwards the hot rows are ordered: unused ones as before, then the fetched ones in the
    order of the selection, then those that were hit, as before. Needs H ≥ K: what is hit is never evicted. No hot row
    holds `own` afterwards.
    """
    batch, k = selected.shape
    rows, device = residency.rows, selected.device
    owner, order, where = residency.owner[group], residency.order[group], residency.where[group]
    there = torch.arange(batch, device=device) < active
    # Padding rows carry the seat and the selection of whoever was there before: neither may reach a live seat.
    seat = torch.where(there, seats, residency.seats).long()
    selected = torch.where(there.unsqueeze(1), selected, -1)

    asked = selected >= 0
    newest = asked & (selected == own.unsqueeze(1))
    asked = asked & ~newest
    inside = asked & (selected < residency.slots)
    safe = torch.where(inside, selected, residency.slots).long()
    held = where[safe].long()
    tags, kept = owner[seat], order[seat].long()
    hit = inside & (held >= 0) & (tags.gather(1, held.clamp(min=0)) == selected)
    miss = asked & ~hit

    used = torch.zeros(batch, rows + 1, dtype=torch.bool, device=device)
    used.scatter_(1, torch.where(hit, held, rows), True)
    unused = ~used[:, :rows].gather(1, kept)
    rank = unused.cumsum(1)
    count, misses = rank[:, -1:], miss.sum(1, keepdim=True)
    evicted = unused & (rank <= misses)
    hit_at = count + torch.arange(rows, device=device) - rank
    place = torch.where(unused, torch.where(evicted, count - misses, -misses) + rank - 1, hit_at)
    after = torch.empty_like(kept).scatter_(1, place, kept)

    ordinal = miss.cumsum(1) - 1
    taken = after.gather(1, (count - misses + ordinal).clamp(0, rows - 1))
    tag = torch.where(inside, selected, -1)  # a row that no host row fills belongs to nobody
    spare = torch.full((batch, rows + 1), -1, dtype=torch.int32, device=device)
    # The step writes its own slot anew, so that a copy of what was there before is void.
    spare[:, :rows] = torch.where(tags == own.unsqueeze(1), -1, tags)
    lost = miss & (spare.gather(1, taken) >= 0)
    spare.scatter_(1, torch.where(miss, taken, rows), tag)
    more = ((spare[:, :rows] >= 0).sum(1) - (tags >= 0).sum(1))[there]
    owner[seat] = spare[:, :rows]
    order[seat] = after.to(torch.int16)
    where[torch.where(miss & inside, safe, residency.slots)] = taken.to(torch.int16)

    base = (seat * residency.stride).unsqueeze(1)
    at = torch.where(hit, held, torch.where(miss, taken, rows))
    plan.resident.copy_(torch.where(asked | newest, base + at, -1))
    first = misses.cumsum(0) - misses
    into = torch.where(miss, first + ordinal, batch * k).flatten()
    for target, value in ((plan.slots, tag), (plan.rows, plan.resident)):
        target.copy_(torch.cat((target, target[:1])).scatter_(0, into, value.flatten())[:-1])
    plan.count[group] = misses.sum()
    counted = {
        "hits": hit, "misses": miss, "out of bounds": miss & ~inside, "evicted": lost, "held": more,
    }  # fmt: skip
    for name, value in counted.items():
        residency.counters[COUNTERS.index(name)] += value.sum()


def gather(
    residency: Residency, group: int, plan: Plan, host: HostRows, hot: torch.Tensor, layers: range, *,
    debug: bool = False, beside: bool = False,
) -> None:  # fmt: skip
    """Fetch the plan's misses for some layers: hot uint8 [layers, rows, row_bytes].

    `debug` counts rows that were never written; their bytes are those of `POISON`. `beside`: other kernels are to run
    at the same time.
    """
    entry = torch.arange(len(plan.slots), device=plan.slots.device)
    wanted = entry < plan.count[group]
    residency.counters[COUNTERS.index("fetched")] += plan.count[group] * len(layers)
    found = (wanted & (plan.slots >= 0)).to(host.tensor.device).unsqueeze(1)
    slot = torch.where(found[:, 0], plan.slots.to(host.tensor.device), 0).long()
    for layer in layers:
        rows = host.layer(layer)[slot // host.block_size, slot % host.block_size]
        if debug:
            unwritten = (found & (rows == POISON).all(1, keepdim=True)).sum()
            residency.counters[COUNTERS.index("unwritten")] += unwritten.to(residency.counters.device)
        rows = torch.where(found, rows, 0).to(hot.device)
        # What is not wanted goes to the last row, which is no seat's.
        hot[layer][torch.where(wanted, plan.rows, hot.shape[1] - 1).long()] = rows


def write_back(
    plan: Plan, own: torch.Tensor, active: torch.Tensor, host: HostRows, hot: torch.Tensor, layers: range
) -> None:  # fmt: skip
    """The new tokens' rows of some layers into host memory; own int32 [T]: their KV slots."""
    there = (torch.arange(len(own), device=own.device) < active).to(host.tensor.device)
    there = there & (own >= 0).to(host.tensor.device) & (own < host.slots).to(host.tensor.device)
    slot = torch.where(there, own.to(host.tensor.device), 0).long()
    at = slot // host.block_size, slot % host.block_size
    for layer in layers:
        rows = hot[layer][plan.newest.clamp(min=0).long()].to(host.tensor.device)
        # Slot 0 is somebody's: padding rows must not even write back what they have read there.
        host.layer(layer)[at[0][there], at[1][there]] = rows[there]


def copy_blocks(ids: torch.Tensor, source: torch.Tensor, into: torch.Tensor) -> None:
    """Bytes of whole blocks between host and device; ids int64 [N]; uint8 [blocks, W] and [blocks, at least W]."""
    into[ids.to(into.device), : source.shape[1]] = source[ids.to(source.device)].to(into.device)
