"""The mixture of experts for few rows: router, choice, and the chosen experts' gated MLPs as two grouped products.

The shared expert is expert number E of the same products: every row goes to it with weight 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm52_engine.kernels import linear
from glm52_engine.kernels.chain import CHAINED, after_previous, fetch_ahead


@triton.jit
def _choose(
    logits, bias, active_rows, counts, members, weights, busy,
    rows, experts, scaling,
    TOP: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, NORM: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    t = tl.arange(0, BT)
    e = tl.arange(0, BE)
    live = t < tl.load(active_rows)
    known = e < experts
    mask = live[:, None] & known[None, :]
    logit = tl.zeros((BT, BE), tl.float32)
    for split in tl.static_range(SPLITS):
        logit += tl.load(logits + (split * rows + t[:, None]) * experts + e[None, :], mask, other=0.0)
    score = tl.sigmoid(logit)
    left = tl.where(mask, score + tl.load(bias + e, known, other=0.0)[None, :], float("-inf"))
    slot = tl.full((BT, BE), -1, tl.int32)
    for i in tl.static_range(TOP):
        best = tl.argmax(left, 1)
        hit = (e[None, :] == best[:, None]) & mask
        slot = tl.where(hit, i, slot)
        left = tl.where(hit, float("-inf"), left)
    chosen = slot >= 0
    weight = tl.where(chosen, score, 0.0)
    if NORM:
        weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]
    flat = t[:, None] * SLOTS + slot
    tl.store(weights + flat, weight * scaling, chosen)
    tl.store(weights + t * SLOTS + TOP, tl.full((BT,), 1.0, tl.float32), t < rows)
    rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(members + e[None, :] * rows + rank, flat, chosen)
    tl.store(members + experts * rows + t, t * SLOTS + TOP, t < rows)
    count = tl.sum(chosen.to(tl.int32), 0)
    tl.store(counts + e, count, known)
    tl.store(counts + experts, tl.load(active_rows))
    used = count > 0
    at = tl.cumsum(used.to(tl.int32), 0) - 1
    total = tl.sum(used.to(tl.int32), 0)
    tl.store(busy + 1, experts)
    tl.store(busy + 2 + at, e, used)
    tl.store(busy, total + 1)


@triton.jit
def _fetch_rows(w, n, n_total, k_total, PDL: tl.constexpr):
    """The first 4 KiB of rows n, or less where rows are shorter."""
    line: tl.constexpr = 1024 // w.dtype.element_ty.primitive_bitwidth
    k = tl.minimum(tl.arange(0, 32) * line, k_total - 1)
    fetch_ahead(w + tl.minimum(n, n_total - 1).to(tl.int64)[:, None] * k_total + k[None, :], PDL)


@triton.jit
def _up(
    x, w, scale, counts, members, busy, out,
    rows, dim, inner, experts,
    SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if which == 0:  # the shared expert, whoever else is chosen
        _fetch_rows(w + tl.cast(experts, tl.int64) * 2 * inner * dim, n, inner, dim, PDL)
        _fetch_rows(w + (tl.cast(experts, tl.int64) * 2 + 1) * inner * dim, n, inner, dim, PDL)
    after_previous(PDL)
    if which < tl.load(busy):
        expert = tl.load(busy + 1 + which)
        count = tl.load(counts + expert)
        k = tl.arange(0, BK)
        n_in = n < inner
        base = w + expert.to(tl.int64) * 2 * inner * dim
        gate = base + n.to(tl.int64)[:, None] * dim + k[None, :]
        by_row = tl.cdiv(dim, 128)
        if FP8:
            by = scale + expert.to(tl.int64) * (2 * inner // 128) * by_row + (n // 128) * by_row
        for first in range(0, count, BM):
            m = first + tl.arange(0, BM)
            flat = tl.load(members + expert * rows + m, m < count, other=-1)
            token = x + (flat // SLOTS).to(tl.int64)[None, :] * dim + k[:, None]
            m_in = (flat >= 0)[None, :]
            acc_gate = tl.zeros((BN, BM), tl.float32)
            acc_up = tl.zeros((BN, BM), tl.float32)
            for start in range(0, dim, BK):
                k_in = start + k < dim
                wg = tl.load(gate + start, n_in[:, None] & k_in[None, :], other=0.0)
                wu = tl.load(gate + inner * dim + start, n_in[:, None] & k_in[None, :], other=0.0)
                xs = tl.load(token + start, m_in & k_in[:, None], other=0.0)
                if FP8:
                    sg = tl.load(by + start // 128, n_in, other=0.0)
                    su = tl.load(by + (inner // 128) * by_row + start // 128, n_in, other=0.0)
                    acc_gate += tl.dot(wg.to(xs.dtype), xs) * sg[:, None]
                    acc_up += tl.dot(wu.to(xs.dtype), xs) * su[:, None]
                else:
                    acc_gate = tl.dot(wg, xs, acc_gate)
                    acc_up = tl.dot(wu, xs, acc_up)
            gated = acc_gate * tl.sigmoid(acc_gate) * acc_up
            at = out + flat.to(tl.int64)[None, :] * inner + n[:, None]
            tl.store(at, gated.to(out.dtype.element_ty), m_in & n_in[:, None])


@triton.jit
def _down(
    h, w, scale, counts, members, busy, weights, out,
    rows, dim, inner, experts,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if which == 0:
        _fetch_rows(w + tl.cast(experts, tl.int64) * dim * inner, n, dim, inner, PDL)
    after_previous(PDL)
    if which < tl.load(busy):
        expert = tl.load(busy + 1 + which)
        count = tl.load(counts + expert)
        k = tl.arange(0, BK)
        n_in = n < dim
        base = w + expert.to(tl.int64) * dim * inner + n.to(tl.int64)[:, None] * inner + k[None, :]
        by_row = tl.cdiv(inner, 128)
        if FP8:
            by = scale + expert.to(tl.int64) * tl.cdiv(dim, 128) * by_row + (n // 128) * by_row
        for first in range(0, count, BM):
            m = first + tl.arange(0, BM)
            flat = tl.load(members + expert * rows + m, m < count, other=-1)
            m_in = (flat >= 0)[None, :]
            row = h + flat.to(tl.int64)[None, :] * inner + k[:, None]
            acc = tl.zeros((BN, BM), tl.float32)
            for start in range(0, inner, BK):
                k_in = start + k < inner
                ws = tl.load(base + start, n_in[:, None] & k_in[None, :], other=0.0)
                xs = tl.load(row + start, m_in & k_in[:, None], other=0.0)
                if FP8:
                    s = tl.load(by + start // 128, n_in, other=0.0)
                    acc += tl.dot(ws.to(xs.dtype), xs) * s[:, None]
                else:
                    acc = tl.dot(ws, xs, acc)
            weight = tl.load(weights + flat, flat >= 0, other=0.0)
            at = out + flat.to(tl.int64)[None, :] * dim + n[:, None]
            tl.store(at, (acc * weight[None, :]).to(out.dtype.element_ty), m_in & n_in[:, None])


_ROUTER_SPLITS = 8


class Routed:
    """Work buffers of one MoE layer's choice for T rows: who goes where, and with what weight.

    counts int32 [E + 1]; members int32 [E + 1, T]: row × slots + slot, in order of rows; weights float32 [T, slots];
    busy int32 [2 + E]: how many experts have rows, then their numbers, the shared one first. slots = experts per
    token + 1.
    """

    def __init__(self, rows: int, experts: int, top: int, device: torch.device | str) -> None:
        self.rows, self.experts, self.top, self.slots = rows, experts, top, top + 1
        self.logits = torch.empty(_ROUTER_SPLITS, rows, experts, dtype=torch.float32, device=device)
        self.counts = torch.zeros(experts + 1, dtype=torch.int32, device=device)
        self.members = torch.zeros(experts + 1, rows, dtype=torch.int32, device=device)
        self.weights = torch.zeros(rows, self.slots, dtype=torch.float32, device=device)
        self.busy = torch.zeros(experts + 2, dtype=torch.int32, device=device)

    @classmethod
    def everything(cls, rows: int, device: torch.device | str) -> Routed:
        """All rows to one expert with weight 1: a dense MLP runs through the same products."""
        routed = cls(rows, 0, 0, device)
        routed.counts.fill_(rows)
        routed.members.copy_(torch.arange(rows, dtype=torch.int32, device=device))
        routed.weights.fill_(1)
        routed.busy.copy_(torch.tensor([1, 0], dtype=torch.int32))
        return routed

    @property
    def most_busy(self) -> int:
        """The most experts that can have rows."""
        return min(self.rows * self.top, self.experts) + 1


def route(
    x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, active: torch.Tensor, into: Routed,
    *, scaling: float, normalise: bool,
) -> None:  # fmt: skip
    """Sigmoid router with correction bias: the bias takes part in the choice alone, ties go to the lowest expert.

    x [T, D]; gate [E, D] in x's dtype, multiplied and summed in float32; rows at or behind `active` go nowhere.
    """
    linear.linear(x, gate, into.logits, block_n=32)
    rows = x.shape[0]
    _choose[(1,)](
        into.logits, bias, active, into.counts, into.members, into.weights, into.busy, rows, into.experts, scaling,
        TOP=into.top, BT=triton.next_power_of_2(rows), BE=triton.next_power_of_2(into.experts), NORM=normalise,
        SLOTS=into.slots, SPLITS=_ROUTER_SPLITS, num_warps=8, **CHAINED,
    )  # fmt: skip


def up(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, routed: Routed, *, scale: torch.Tensor | None = None
) -> None:
    """out[row, slot] = silu(x gate^T) × (x up^T) of the slot's expert; weight [E + 1, 2 × inner, D], gate first.

    x [T, D]; out [T, slots, inner]. FP8 weights have `scale` float32 [E + 1, 2 × inner / 128, D / 128].
    """
    rows, dim = x.shape
    inner = out.shape[2]
    _up[(triton.cdiv(inner, 64), routed.most_busy)](
        x, weight, scale, routed.counts, routed.members, routed.busy, out, rows, dim, inner, routed.experts,
        SLOTS=routed.slots, BM=_block_m(rows), BN=64, BK=min(128, triton.next_power_of_2(dim)),
        FP8=scale is not None, num_warps=4, num_stages=5 if rows <= 16 else 4, **CHAINED,
    )  # fmt: skip


def _block_m(rows: int) -> int:
    """Rows a pass of an expert takes: an expert with more reads its weights again."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def down(
    h: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, routed: Routed, *, scale: torch.Tensor | None = None
) -> None:
    """out[row, slot] = weight of the slot × (h down^T).

    weight [E + 1, D, inner]; h [T, slots, inner]; out [T, slots, D].
    """
    rows, _, inner = h.shape
    dim = out.shape[2]
    # Measured on an H200; the scales of FP8 blocks want whole blocks.
    block_n, block_k, stages = (128, 128, 3) if rows <= 16 else (64, 128, 3) if rows <= 32 else (64, 64, 3)
    if scale is not None:
        block_n, block_k, stages = 64, 128, 4
    _down[(triton.cdiv(dim, block_n), routed.most_busy)](
        h, weight, scale, routed.counts, routed.members, routed.busy, routed.weights, out, rows, dim, inner,
        routed.experts, BM=_block_m(rows), BN=block_n, BK=min(block_k, triton.next_power_of_2(inner)),
        FP8=scale is not None, num_warps=4, num_stages=stages, **CHAINED,
    )  # fmt: skip


@triton.jit
def _gate(both, weights, out, inner, BI: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BI + tl.arange(0, BI)
    inside = n < inner
    gate = tl.load(both + row * 2 * inner + n, inside, other=0.0).to(tl.float32)
    raised = tl.load(both + row * 2 * inner + inner + n, inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * raised * tl.load(weights + row)
    tl.store(out + row * inner + n, value.to(out.dtype.element_ty), inside)


def gate(both: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """out = weight of the row × silu(first half) × second half; both [N, 2 × inner], weights float32 [N]."""
    rows, inner = out.shape
    _gate[(rows, triton.cdiv(inner, 1024))](both, weights, out, inner, BI=1024, num_warps=4, **CHAINED)


@triton.jit
def _gather_sum(shared, parts, places, out, dim, TOP: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = d < dim
    total = tl.load(shared + row * dim + d, inside, other=0.0).to(tl.float32)
    for i in tl.static_range(TOP):
        place = tl.load(places + row * TOP + i).to(tl.int64)
        total += tl.load(parts + place * dim + d, inside, other=0.0).to(tl.float32)
    tl.store(out + row * dim + d, total.to(out.dtype.element_ty), inside)


def gather_sum(shared: torch.Tensor, parts: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
    """out[t] = shared[t] + sum over i of parts[places[t, i]]; all [.., D], places int64 [T, top]."""
    rows, dim = out.shape
    _gather_sum[(rows, triton.cdiv(dim, 2048))](
        shared, parts, places, out, dim, TOP=places.shape[1], BD=2048, num_warps=8, **CHAINED
    )
