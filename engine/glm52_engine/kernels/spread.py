"""The mixture of experts of few rows where the experts lie on several ranks: what stands around the grouped products.

`decide` chooses for a rank's own rows and lays each beside what was chosen for it; when the rows of all ranks are
there, `assign` finds those of this rank's experts; `moe.up` and `moe.down` compute them; `add_up` sums them by row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm52_engine.kernels import linear, moe
from glm52_engine.kernels.chain import CHAINED, after_previous

_ALIGNED = 64
"""Bytes of which a row is a multiple: kernels then read it in as large pieces as a row of its own."""


class Travelling:
    """Rows of `ranks` ranks, `rows` each, as they travel: what experts take, and who is chosen with what weight.

    raw uint8 [ranks, rows, bytes of a row]; its views, by rank and row: values [ranks × rows, D]; experts int32
    [ranks × rows, top], -1 where none is; weights float32 [ranks × rows, top].
    """

    def __init__(
        self, ranks: int, rows: int, dim: int, top: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        after = -(-dim * dtype.itemsize // 16) * 16
        size = -(-(after + 8 * top) // _ALIGNED) * _ALIGNED
        self.raw = torch.empty(ranks, rows, size, dtype=torch.uint8, device=device)
        flat, first = self.raw.flatten(0, 1), after // 4
        self.values = flat.view(dtype)[:, :dim]
        self.experts = flat.view(torch.int32)[:, first : first + top]
        self.weights = flat.view(torch.float32)[:, first + top : first + 2 * top]


class Routed(moe.Routed):
    """`moe.Routed` of the rows of all ranks, `rows` each, and of the experts `held` here and the shared one.

    Rows count by rank, then by row; the shared expert has the own ones only. Experts have rows in no order.
    """

    def __init__(
        self, rows: int, held: range, experts: int, top: int, *, rank: int, world: int, device: torch.device | str
    ) -> None:
        super().__init__(world * rows, len(held), top, device)
        self.held, self.own_rows, self.own_first = held, rows, rank * rows
        self.logits = torch.empty(moe.ROUTER_SPLITS, rows, experts, dtype=torch.float32, device=device)


@triton.jit
def _decide(
    x, logits, bias, active_rows, values, ids, weights, busy,
    rows, dim, experts, value_row, id_row, scaling,
    TOP: tl.constexpr, BK: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0)
    if row == 0:
        tl.store(busy, 0)
    ids += row.to(tl.int64) * id_row
    k = tl.arange(0, BK)
    tl.store(ids + k, tl.full((BK,), -1, tl.int32), k < TOP)
    d = tl.arange(0, BD)
    value = tl.load(x + row.to(tl.int64) * dim + d, d < dim, other=0.0)
    tl.store(values + row.to(tl.int64) * value_row + d, value, d < dim)
    e = tl.arange(0, BE)
    known = e < tl.where(row < tl.load(active_rows), experts, 0)
    logit = tl.zeros((BE,), tl.float32)
    for split in tl.static_range(SPLITS):
        logit += tl.load(logits + (split * rows + row) * experts + e, known, other=0.0)
    score = tl.sigmoid(logit)
    left = tl.where(known, score + tl.load(bias + e, known, other=0.0), float("-inf"))
    slot = tl.full((BE,), -1, tl.int32)
    for i in tl.static_range(TOP):
        hit = (e == tl.argmax(left, 0)) & known
        slot = tl.where(hit, i, slot)
        left = tl.where(hit, float("-inf"), left)
    chosen = slot >= 0
    weight = tl.where(chosen, score, 0.0)
    if NORM:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    # What is filled above and stored to here may be other threads'.
    tl.debug_barrier()
    tl.store(ids + slot, e, chosen)
    tl.store(weights + row.to(tl.int64) * id_row + slot, weight * scaling, chosen)


def decide(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, active: torch.Tensor, routed: Routed, own: Travelling,
    *, scaling: float, normalise: bool,
) -> None:  # fmt: skip
    """The choice of `moe.route` for this rank's rows, and the rows themselves, into `own`.

    x [T, D]; gate [experts of all ranks, D]; rows at or behind `active` (int32 scalar) choose nobody.
    """
    linear.linear(x, gate, routed.logits, block_n=32)
    (rows, dim), experts = x.shape, len(gate)
    _decide[(rows,)](
        x, routed.logits, bias, active, own.values, own.experts, own.weights, routed.busy,
        rows, dim, experts, own.values.stride(0), own.experts.stride(0), scaling,
        TOP=routed.top, BK=triton.next_power_of_2(routed.top), BE=triton.next_power_of_2(experts),
        BD=triton.next_power_of_2(dim), NORM=normalise, SPLITS=moe.ROUTER_SPLITS, num_warps=4, **CHAINED,
    )  # fmt: skip


@triton.jit
def _assign(
    ids, weights, active_rows, counts, members, slot_weights, busy,
    rows, id_row, first_expert, held, own_rows, own_first,
    TOP: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    expert = tl.program_id(0)
    t = tl.arange(0, BT)
    into = members + expert * rows
    count = tl.load(active_rows)
    if expert < held:
        k = tl.arange(0, BK)
        count = count * 0
        for first in range(0, rows, BT):
            row = first + t
            at = row.to(tl.int64) * id_row
            there = (row < rows)[:, None] & (k < TOP)[None, :]
            chosen = tl.load(ids + at[:, None] + k[None, :], there, other=-1)
            # The greatest, never a sum: a row that is no number may name an expert twice, and its slot must exist.
            slot = tl.max(tl.where(chosen == first_expert + expert, k[None, :], -1), 1)
            found = slot >= 0
            flat = row * SLOTS + slot
            tl.store(into + count + tl.cumsum(found.to(tl.int32), 0) - 1, flat, found)
            tl.store(slot_weights + flat, tl.load(weights + at + slot, found, other=0.0), found)
            count += tl.sum(found.to(tl.int32), 0)
    else:
        for first in range(0, own_rows, BT):
            row = first + t
            flat = (own_first + row) * SLOTS + TOP
            tl.store(into + row, flat, row < count)
            tl.store(slot_weights + flat, tl.full((BT,), 1.0, tl.float32), row < count)
    tl.store(counts + expert, count)
    if count > 0:
        place = tl.atomic_add(busy, 1)
        tl.store(busy + 1 + place, expert)


def assign(everyone: Travelling, active: torch.Tensor, routed: Routed) -> None:
    """Fill `routed` from the rows of all ranks; of the own ones the first `active` (int32 scalar) are real.

    After `decide`, which empties `busy`.
    """
    block = min(1024, triton.next_power_of_2(routed.rows))
    _assign[(routed.experts + 1,)](
        everyone.experts, everyone.weights, active, routed.counts, routed.members, routed.weights, routed.busy,
        routed.rows, everyone.experts.stride(0), routed.held.start, routed.experts, routed.own_rows, routed.own_first,
        TOP=routed.top, BK=triton.next_power_of_2(routed.top), BT=block, SLOTS=routed.slots,
        num_warps=8 if block > 256 else 4, **CHAINED,
    )  # fmt: skip


@triton.jit
def _add_up(
    shares, ids, active_rows, out, dim, id_row, first_expert, held, own_first,
    TOP: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at = shares + row * (TOP + 1) * dim + d
    total = tl.zeros((BD,), tl.float32)
    for i in tl.static_range(TOP):
        expert = tl.load(ids + row * id_row + i) - first_expert
        # Whatever is in a slot that nobody computed was another layer's.
        there = tl.where((expert >= 0) & (expert < held), dim, 0)
        total += tl.load(at + i * dim, d < there, other=0.0).to(tl.float32)
    there = tl.where((row >= own_first) & (row - own_first < tl.load(active_rows)), dim, 0)
    total += tl.load(at + TOP * dim, d < there, other=0.0).to(tl.float32)
    tl.store(out + row * dim + d, total, d < dim)


def add_up(shares: torch.Tensor, everyone: Travelling, active: torch.Tensor, routed: Routed, out: torch.Tensor) -> None:
    """out[row] = sum in float32, by slot, of what this rank computed for the row; 0 where it computed nothing.

    shares [ranks × rows, slots, D], out float32 [ranks × rows, D].
    """
    rows, _, dim = shares.shape
    block = min(2048, triton.next_power_of_2(dim))
    _add_up[(rows, triton.cdiv(dim, block))](
        shares, everyone.experts, active, out, dim, everyone.experts.stride(0), routed.held.start, routed.experts,
        routed.own_first, TOP=routed.top, BD=block, num_warps=4, **CHAINED,
    )  # fmt: skip


@triton.jit
def _sum_placed(parts, places, out, dim, TOP: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for i in tl.static_range(TOP):
        place = tl.load(places + row * TOP + i).to(tl.int64)
        there = tl.where(place >= 0, dim, 0)
        total += tl.load(parts + place * dim + d, d < there, other=0.0).to(tl.float32)
    tl.store(out + row * dim + d, total, d < dim)


def sum_placed(parts: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = sum over i of parts[places[t, i]], but for places of -1; parts [.., D], places int64 [T, top], out
    float32 [T, D]."""
    rows, dim = out.shape
    block = min(2048, triton.next_power_of_2(dim))
    _sum_placed[(rows, triton.cdiv(dim, block))](
        parts, places, out, dim, TOP=places.shape[1], BD=block, num_warps=4, **CHAINED
    )
