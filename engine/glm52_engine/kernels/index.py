"""The DSA indexer on paged keys: scores of every context position, and the K best of them, lowest position first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm52_engine.kernels.chain import CHAINED, after_previous


@triton.jit
def _scores(
    query, head_weights, keys, table, lengths, scores,
    rows, table_row, key_block, key_row, score_row, block_size, top_k,
    HEADS: tl.constexpr, DIM: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    there = row < rows
    first = tl.program_id(1) * BL
    length = tl.load(lengths + row, there, other=0)
    longest = tl.max(length, 0)
    # A context of at most K is selected whole: its scores are never looked at.
    if (first < longest) & (longest > top_k):
        at = first + tl.arange(0, BL)
        d = tl.arange(0, DIM)
        head = tl.program_id(0).to(tl.int64) * BR * HEADS + tl.arange(0, BR * HEADS)
        known = head < rows * HEADS
        blocks = table + tl.program_id(0).to(tl.int64) * BR * table_row
        block = tl.load(blocks + at // block_size, at < longest, other=0).to(tl.int64)
        from_key = keys + block * key_block + (at % block_size) * key_row
        key = tl.load(from_key[:, None] + d[None, :], (at < longest)[:, None], other=0.0)
        q = tl.load(query + head[None, :] * DIM + d[:, None], known[None, :], other=0.0)
        weight = tl.load(head_weights + head, known, other=0.0)
        per_head = tl.maximum(tl.dot(key, q), 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(per_head, (BL, BR, HEADS)), 2)
        into = scores + row.to(tl.int64)[None, :] * score_row + at[:, None]
        tl.store(into, score, there[None, :] & (at[:, None] < length[None, :]))


def scores(
    query: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, *, top_k: int, together: int = 1, block_l: int = 128, warps: int = 4,
) -> None:  # fmt: skip
    """out[t, p] = sum over heads of weight × relu(query · key of position p), for p < lengths[t].

    query [T, H, D] rotated; head_weights float32 [T, H] with all scales in them; keys [blocks, block_size, D] in any
    strides with D contiguous; table int32 [T, most blocks]; lengths int32 [T]; out float32 [T, longest]. Scores of
    rows that are not longer than `top_k` may stay unwritten.

    `together` (a power of two): so many rows at a time belong to one sequence, and share every key that is read.
    """
    rows, heads, dim = query.shape
    _scores[(triton.cdiv(rows, together), triton.cdiv(out.shape[1], block_l))](
        query, head_weights, keys, table, lengths, out,
        rows, table.stride(0), keys.stride(0), keys.stride(1), out.stride(0), keys.shape[1], top_k,
        HEADS=heads, DIM=dim, BL=block_l, BR=together, num_warps=warps if together == 1 else 8, **CHAINED,
    )  # fmt: skip


@triton.jit
def _ordered(x):
    """float32 → int32 in the same order: what radix selection compares."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is +0.0: both zeros are one plateau
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


DIGITS = (11, 11, 10)
"""Bits that each pass of the selection decides, from the top."""

BINS = 1 << max(DIGITS)


@triton.jit
def _digit(key, STEP: tl.constexpr):
    """The bits of an ordered key that a pass decides, as a number that grows with the key."""
    if STEP == 0:
        return ((key >> 21) & 0x7FF) ^ 0x400  # the sign bit sorts the other way round
    if STEP == 1:
        return (key >> 10) & 0x7FF
    return key & 0x3FF


@triton.jit
def _border(counts, need, BINS: tl.constexpr):
    """Of a histogram: the digit of the need-th largest key, and how many of that digit are needed."""
    bins = tl.arange(0, BINS)
    count = tl.load(counts + bins)
    above = tl.sum(count, 0) - tl.cumsum(count, 0)
    digit = tl.max(tl.where(above + count >= need, bins, 0), 0)
    return digit, need - tl.sum(tl.where(bins == digit, above, 0), 0)


@triton.jit
def _known(counts, K: tl.constexpr, STEP: tl.constexpr, BINS: tl.constexpr):
    """What the passes before STEP have decided: the threshold's leading bits, and how many ties are needed.

    Only the last histogram is new: what the ones before decided is kept behind the third, which has 1,024 bins.
    """
    prefix = 0
    need = K
    kept = counts + 2 * BINS + 1024
    if STEP == 1:
        digit, need = _border(counts, need, BINS)
        prefix = ((digit ^ 0x400) << 21) >> 21
    if STEP == 2:
        digit, need = _border(counts + BINS, tl.load(kept + 1), BINS)
        prefix = (tl.load(kept) << 11) | digit
    if STEP == 3:
        digit, need = _border(counts + 2 * BINS, tl.load(kept + 3), BINS // 2)
        prefix = (tl.load(kept + 2) << 10) | digit
    return prefix, need


@triton.jit
def _count(
    scores, lengths, counts, score_row,
    K: tl.constexpr, STEP: tl.constexpr, BINS: tl.constexpr, BL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BL
    length = tl.load(lengths + row)
    if (length > K) & (first < length):
        counts += row * 3 * BINS
        prefix, need = _known(counts, K, STEP, BINS)
        if (STEP > 0) & (first == 0):
            tl.store(counts + 2 * BINS + 1024 + 2 * (STEP - 1), prefix)
            tl.store(counts + 2 * BINS + 1024 + 2 * (STEP - 1) + 1, need)
        at = first + tl.arange(0, BL)
        alive = at < length
        key = _ordered(tl.load(scores + row * score_row + at, alive, other=0.0))
        if STEP == 1:
            alive = alive & ((key >> 21) == prefix)
        if STEP == 2:
            alive = alive & ((key >> 10) == prefix)
        tl.atomic_add(counts + STEP * BINS + _digit(key, STEP), 1, mask=alive, sem="relaxed")


@triton.jit
def _emit(
    scores, lengths, table, counts, zero, selected, score_row, table_row, block_size, block_rows,
    K: tl.constexpr, BINS: tl.constexpr, BL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    length = tl.load(lengths + row)
    lane = tl.arange(0, BL)
    out = selected + row * K
    blocks = table + row * table_row
    if part == 0:
        tl.store(zero + row * 3 * BINS + tl.arange(0, 4 * BINS), 0, tl.arange(0, 4 * BINS) < 3 * BINS)
    if length <= K:
        whole = part * BL + lane
        there = whole < length
        block = tl.load(blocks + whole // block_size, there, other=0)
        tl.store(out + whole, tl.where(there, block * block_rows + whole % block_size, -1), whole < K)
    elif part * BL < length:
        scores += row * score_row
        border, need = _known(counts + row * 3 * BINS, K, 3, BINS)
        written = 0
        ties = 0
        for before in range(0, part * BL, BL):
            key = _ordered(tl.load(scores + before + lane))
            written += tl.sum((key > border).to(tl.int32), 0)
            ties += tl.sum((key == border).to(tl.int32), 0)
        written += tl.minimum(ties, need)
        at = part * BL + lane
        inside = at < length
        own = _ordered(tl.load(scores + at, inside, other=0.0))
        tied = (own == border) & inside
        rank = ties + tl.cumsum(tied.to(tl.int32), 0)
        chosen = ((own > border) & inside) | (tied & (rank <= need))
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        page = tl.load(blocks + at // block_size, chosen, other=0)
        tl.store(out + place, page * block_rows + at % block_size, chosen)


def top_k(
    scores: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, selected: torch.Tensor,
    counts: tuple[torch.Tensor, torch.Tensor], *, block_size: int, block_rows: int, block_l: int = 2048,
) -> None:  # fmt: skip
    """selected int32 [T, K]: cache rows of the K best positions below lengths[t], ascending by position, then -1.

    scores float32 [T, longest]. counts: two int32 [T, 3, BINS], the first all zero: it is used, and the second is
    zeroed for the next call, which takes them the other way round.

    Radix selection, 11 bits a pass, with as many programs a row as its context is long; the last pass writes in order
    of position because it counts what the programs before it choose. Among equal scores the lowest position wins:
    relu makes plateaus of exact zeros, and two ranks, or prefill and decode, must choose the same tokens.
    """
    rows, k = selected.shape
    block = min(block_l, triton.next_power_of_2(max(k, scores.shape[1])))
    grid = (rows, triton.cdiv(max(k, scores.shape[1]), block))
    now, then = counts
    warps = max(1, min(16, block // 256))
    for step in range(3):
        _count[grid](
            scores, lengths, now, scores.stride(0), K=k, STEP=step, BINS=BINS, BL=block, num_warps=warps, **CHAINED,
        )  # fmt: skip
    _emit[grid](
        scores, lengths, table, now, then, selected, scores.stride(0), table.stride(0), block_size, block_rows,
        K=k, BINS=BINS, BL=block, num_warps=warps, **CHAINED,
    )  # fmt: skip


def top_k_counts(rows: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """The work space of `top_k`, ready for the first call."""
    both = torch.zeros(2, rows, 3, BINS, dtype=torch.int32, device=device)
    return both[0], both[1]
