"""The mixture of experts for few rows: router, choice, and the chosen experts' gated MLPs as two grouped products.

The shared expert is expert number E of the same products: every row goes to it with weight 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from glm52_engine.kernels import linear
from glm52_engine.kernels.chain import CHAINED, after_previous


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
    tl.store(busy + 1 + at, e, used)
    tl.store(busy + 1 + total, experts)
    tl.store(busy, total + 1)


@triton.jit
def _up(
    x, w, scale, counts, members, busy, out,
    rows, dim, inner, x_row,
    SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    which = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if which < tl.load(busy):
        expert = tl.load(busy + 1 + which)
        count = tl.load(counts + expert)
        k = tl.arange(0, BK)
        n_in = n < inner
        each: tl.constexpr = 2 if FP8 else 1
        k_w = tl.arange(0, BK // each)
        base = w + expert.to(tl.int64) * 2 * inner * (dim // each)
        gate = base + n.to(tl.int64)[:, None] * (dim // each) + k_w[None, :]
        by_row = tl.cdiv(dim, 128)
        if FP8:
            by = scale + expert.to(tl.int64) * (2 * inner // 128) * by_row + (n // 128) * by_row
        for first in range(0, count, BM):
            m = first + tl.arange(0, BM)
            flat = tl.load(members + expert * rows + m, m < count, other=-1)
            token = x + (flat // SLOTS).to(tl.int64)[None, :] * x_row + k[:, None]
            m_in = (flat >= 0)[None, :]
            acc_gate = tl.zeros((BN, BM), tl.float32)
            acc_up = tl.zeros((BN, BM), tl.float32)
            for start in range(0, dim, BK):
                k_in = start + k < dim
                w_in = n_in[:, None] & (start // each + k_w < dim // each)[None, :]
                wg = tl.load(gate + start // each, w_in, other=0)
                wu = tl.load(gate + inner * (dim // each) + start // each, w_in, other=0)
                xs = tl.load(token + start, m_in & k_in[:, None], other=0.0)
                if FP8:
                    sg = tl.load(by + start // 128, n_in, other=0.0)
                    su = tl.load(by + (inner // 128) * by_row + start // 128, n_in, other=0.0)
                    acc_gate += linear.fp8_dot(wg, xs) * sg[:, None]
                    acc_up += linear.fp8_dot(wu, xs) * su[:, None]
                else:
                    acc_gate = tl.dot(wg, xs, acc_gate)
                    acc_up = tl.dot(wu, xs, acc_up)
            gated = acc_gate * tl.sigmoid(acc_gate) * acc_up
            at = out + flat.to(tl.int64)[None, :] * inner + n[:, None]
            tl.store(at, gated.to(out.dtype.element_ty), m_in & n_in[:, None])


@triton.jit
def _down(
    h, w, scale, counts, members, busy, weights, out,
    rows, dim, inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    which = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if which < tl.load(busy):
        expert = tl.load(busy + 1 + which)
        count = tl.load(counts + expert)
        k = tl.arange(0, BK)
        n_in = n < dim
        each: tl.constexpr = 2 if FP8 else 1
        k_w = tl.arange(0, BK // each)
        width = inner // each
        base = w + expert.to(tl.int64) * dim * width + n.to(tl.int64)[:, None] * width + k_w[None, :]
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
                w_in = n_in[:, None] & (start // each + k_w < width)[None, :]
                ws = tl.load(base + start // each, w_in, other=0)
                xs = tl.load(row + start, m_in & k_in[:, None], other=0.0)
                if FP8:
                    s = tl.load(by + start // 128, n_in, other=0.0)
                    acc += linear.fp8_dot(ws, xs) * s[:, None]
                else:
                    acc = tl.dot(ws, xs, acc)
            weight = tl.load(weights + flat, flat >= 0, other=0.0)
            at = out + flat.to(tl.int64)[None, :] * dim + n[:, None]
            tl.store(at, (acc * weight[None, :]).to(out.dtype.element_ty), m_in & n_in[:, None])


ROUTER_SPLITS = 8


class Routed:
    """Work buffers of one MoE layer's choice for T rows: who goes where, and with what weight.

    counts int32 [E + 1]; members int32 [E + 1, T]: row × slots + slot, in order of rows; weights float32 [T, slots];
    busy int32 [2 + E]: how many experts have rows, then their numbers. slots = experts per token + 1.
    """

    def __init__(self, rows: int, experts: int, top: int, device: torch.device | str) -> None:
        self.rows, self.experts, self.top, self.slots = rows, experts, top, top + 1
        self.logits = torch.empty(ROUTER_SPLITS, rows, experts, dtype=torch.float32, device=device)
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
        SLOTS=into.slots, SPLITS=ROUTER_SPLITS, num_warps=8, **CHAINED,
    )  # fmt: skip


def up(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, routed: Routed, *, scale: torch.Tensor | None = None
) -> None:
    """out[row, slot] = silu(x gate^T) × (x up^T) of the slot's expert; weight [E + 1, 2 × inner, D], gate first.

    x [T, D], rows may be strided; out [T, slots, inner]. FP8 weights have `scale` float32
    [E + 1, 2 × inner / 128, D / 128].
    """
    rows, dim = x.shape
    inner = out.shape[2]
    tiles = _up_tiles(rows, dense=routed.experts == 0, fp8=scale is not None)
    _up[(triton.cdiv(inner, tiles.n), routed.most_busy)](
        x, linear.in_pairs(weight), scale, routed.counts, routed.members, routed.busy, out,
        rows, dim, inner, x.stride(0),
        SLOTS=routed.slots, BM=_block_m(rows), BN=tiles.n, BK=min(tiles.k, triton.next_power_of_2(dim)),
        FP8=scale is not None, num_warps=tiles.warps, num_stages=tiles.stages, **CHAINED,
    )  # fmt: skip


class Tiles(NamedTuple):
    """Rows and columns of the weights that a program takes at a time, stages of its pipeline, warps."""

    n: int
    k: int
    stages: int
    warps: int


def _up_tiles(rows: int, *, dense: bool, fp8: bool) -> Tiles:
    """Measured on an H200, in whole steps; the scales of FP8 blocks want k of 128.

    A dense MLP has too few tiles for every multiprocessor twice: one wave of large ones, with more bytes in flight.
    """
    return Tiles(128, 64, 5, 8) if dense and rows > 32 and not fp8 else Tiles(64, 128, 4, 4)


def _down_tiles(rows: int, *, dense: bool, fp8: bool) -> Tiles:
    """See `_up_tiles`."""
    if dense and rows > 32 and not fp8:
        return Tiles(64, 128, 6, 8)
    return Tiles(64, 64, 3, 4) if rows > 32 and not fp8 else Tiles(64, 128, 4, 4)


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
    tiles = _down_tiles(rows, dense=routed.experts == 0, fp8=scale is not None)
    _down[(triton.cdiv(dim, tiles.n), routed.most_busy)](
        h, linear.in_pairs(weight), scale, routed.counts, routed.members, routed.busy, routed.weights, out,
        rows, dim, inner, BM=_block_m(rows), BN=tiles.n, BK=min(tiles.k, triton.next_power_of_2(inner)),
        FP8=scale is not None, num_warps=tiles.warps, num_stages=tiles.stages, **CHAINED,
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
