"""The DSA indexer on paged keys: scores of every context position, and the K best of them, lowest position first."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm52_engine.kernels.cache_rows import Fp8Rows, Rows
from glm52_engine.kernels.chain import CHAINED, after_previous, for_any
from glm52_engine.kernels.rows import split_rows

PROCESSORS = 132
"""Multiprocessors of an H200."""


@triton.jit
def _ordered(x):
    """float32 → int32 in the same order: what radix selection compares."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is +0.0: both zeros are one plateau
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


DIGITS = (11, 11, 10)
"""Bits that each pass of the selection decides, from the top."""

BINS = 1 << max(DIGITS)

PARTS = 1016
"""Programs a row may have: the third histogram has 1,024 bins, and behind it a word for each program finds room."""

_BEHIND = tl.constexpr(2 * BINS + 1024)
"""Where the third histogram ends: 8 words of what the passes have decided, then one for each program of the row."""


@triton.jit
def _digit(key, STEP: tl.constexpr):
    """The bits of an ordered key that a pass decides, as a number that grows with the key."""
    if STEP == 0:
        return ((key >> 21) & 0x7FF) ^ 0x400  # the sign bit sorts the other way round
    if STEP == 1:
        return (key >> 10) & 0x7FF
    return key & 0x3FF


@triton.jit
def _scores(
    query, head_weights, keys, key_scales, table, lengths, scores, counts,
    rows, table_row, key_block, key_row, scale_block, score_row, top_k, tiles,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BL: tl.constexpr, BR: tl.constexpr,
    FP8: tl.constexpr, COUNT: tl.constexpr, BINS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    there = row < rows
    first = tl.program_id(1) * tiles * BL
    length = tl.load(lengths + row, there, other=0)
    longest = tl.max(length, 0)
    # A context of at most K is selected whole: its scores are never looked at.
    if (first < longest) & (longest > top_k):
        d = tl.arange(0, DIM)
        head = tl.program_id(0).to(tl.int64) * BR * HEADS + tl.arange(0, BR * HEADS)
        known = head < rows * HEADS
        q = tl.load(query + head[None, :] * DIM + d[:, None], known[None, :], other=0.0)
        weight = tl.load(head_weights + head, known, other=0.0)
        blocks = table + tl.program_id(0).to(tl.int64) * BR * table_row
        into = scores + row.to(tl.int64)[None, :] * score_row
        for start in tl.range(first, tl.minimum(first + tiles * BL, longest), BL, num_stages=STAGES):
            at = start + tl.arange(0, BL)
            block = tl.load(blocks + at // BLOCK, at < longest, other=0).to(tl.int64)
            from_key = keys + block * key_block + (at % BLOCK) * key_row
            key = tl.load(from_key[:, None] + d[None, :], (at < longest)[:, None], other=0.0)
            per_head = tl.maximum(tl.dot(key.to(q.dtype), q), 0.0) * weight[None, :]
            score = tl.sum(tl.reshape(per_head, (BL, BR, HEADS)), 2)
            if FP8:
                # A scale is positive, so it may stand outside relu.
                by = tl.load(key_scales + block * scale_block + at % BLOCK, at < longest, other=0.0)
                score = score * by[:, None]
            inside = there[None, :] & (at[:, None] < length[None, :])
            tl.store(into + at[:, None], score, inside)
            if COUNT:
                bin_at = counts + row[None, :] * 3 * BINS + _digit(_ordered(score), 0)
                tl.atomic_add(bin_at, 1, mask=inside & (length > top_k)[None, :], sem="relaxed")


_scores_any = for_any(_scores, "rows", "table_row", "tiles", alignment=["table"])


def scores(
    query: torch.Tensor, head_weights: torch.Tensor, keys: Rows, table: torch.Tensor, lengths: torch.Tensor,
    out: torch.Tensor, *, top_k: int, counts: torch.Tensor | None = None, together: int = 1,
    block_l: int | None = None, warps: int | None = None, stages: int | None = None, varying: bool = False,
) -> None:  # fmt: skip
    """out[t, p] = sum over heads of weight × relu(query · key of position p), for p < lengths[t].

    query [T, H, D] rotated; head_weights float32 [T, H] with all scales in them; keys [blocks, block_size, D] in any
    strides with D contiguous, or in FP8; table int32 [T, most blocks]; lengths int32 [T]; out float32 [T, longest].
    Scores of rows that are not longer than `top_k` may stay unwritten.

    `counts`: the first work space of `top_k`, which then need not read the scores once more to count first digits.
    `together` (a power of two): so many rows at a time belong to one sequence, and share every key that is read.
    `varying`: all sizes are others each time. Rows of `out` then want to begin at multiples of 16.
    """
    rows, heads, dim = query.shape
    values, scales, _ = split_rows(keys, 0)
    # Measured on an H200.
    block_l, warps, stages = block_l or (64 if together > 1 else 128), warps or (8 if together > 1 else 4), stages or 2
    groups, every = triton.cdiv(rows, together), triton.cdiv(out.shape[1], block_l)
    # A program takes tiles in a pipeline, as long as four programs for each multiprocessor are left.
    tiles = max(1, min(16, groups * every // (4 * PROCESSORS)))
    (_scores_any if varying else _scores)[(groups, triton.cdiv(every, tiles))](
        query, head_weights, values, scales, table, lengths, out, counts,
        rows, table.stride(0), values.stride(0), values.stride(1), scales.stride(0), out.stride(0), top_k, tiles,
        HEADS=heads, DIM=dim, BLOCK=values.shape[1], BL=block_l, BR=together, FP8=isinstance(keys, Fp8Rows),
        COUNT=counts is not None, BINS=BINS, STAGES=stages, num_warps=warps, **CHAINED,
    )  # fmt: skip


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
    kept = counts + _BEHIND
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
            tl.store(counts + _BEHIND + 2 * (STEP - 1), prefix)
            tl.store(counts + _BEHIND + 2 * (STEP - 1) + 1, need)
        at = first + tl.arange(0, BL)
        alive = at < length
        key = _ordered(tl.load(scores + row * score_row + at, alive, other=0.0))
        if STEP == 1:
            alive = alive & ((key >> 21) == prefix)
        if STEP == 2:
            above = tl.sum((alive & ((key >> 10) > prefix)).to(tl.int32), 0)
            alive = alive & ((key >> 10) == prefix)
            tl.store(counts + _BEHIND + 8 + tl.program_id(1), above | (tl.sum(alive.to(tl.int32), 0) << 16))
        tl.atomic_add(counts + STEP * BINS + _digit(key, STEP), 1, mask=alive, sem="relaxed")


@triton.jit
def _emit(
    scores, lengths, table, counts, zero, selected, score_row, table_row, block_rows,
    K: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, PARTS: tl.constexpr, BL: tl.constexpr,
    PDL: tl.constexpr,
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
        block = tl.load(blocks + whole // BLOCK, there, other=0)
        tl.store(out + whole, tl.where(there, block * block_rows + whole % BLOCK, -1), whole < K)
    elif part * BL < length:
        scores += row * score_row
        counts += row * 3 * BINS
        border, need = _known(counts, K, 3, BINS)
        before = tl.arange(0, PARTS)
        known = tl.load(counts + _BEHIND + 8 + before, before < part, other=0)
        written = tl.sum(known & 0xFFFF, 0)
        ties = 0
        # Only parts that hold keys with the border's leading bits are read again: mostly one or two.
        unsure = tl.min(tl.where(known >> 16 > 0, before, PARTS), 0)
        while unsure < PARTS:
            key = _ordered(tl.load(scores + unsure * BL + lane))
            written += tl.sum(((key > border) & (key >> 10 == border >> 10)).to(tl.int32), 0)
            ties += tl.sum((key == border).to(tl.int32), 0)
            unsure = tl.min(tl.where((known >> 16 > 0) & (before > unsure), before, PARTS), 0)
        written += tl.minimum(ties, need)
        at = part * BL + lane
        inside = at < length
        own = _ordered(tl.load(scores + at, inside, other=0.0))
        tied = (own == border) & inside
        rank = ties + tl.cumsum(tied.to(tl.int32), 0)
        chosen = ((own > border) & inside) | (tied & (rank <= need))
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        page = tl.load(blocks + at // BLOCK, chosen, other=0)
        tl.store(out + place, page * block_rows + at % BLOCK, chosen)


_emit_any = for_any(_emit, "table_row", alignment=["table"])


def top_k(
    scores: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, selected: torch.Tensor,
    counts: tuple[torch.Tensor, torch.Tensor], *, block_size: int, block_rows: int, counted: bool = False,
    block_l: int = 2048, varying: bool = False,
) -> None:  # fmt: skip
    """selected int32 [T, K]: cache rows of the K best positions below lengths[t], ascending by position, then -1.

    scores float32 [T, longest]. counts: two int32 [T, 3, BINS], the first all zero: it is used, and the second is
    zeroed for the next call, which takes them the other way round. `counted`: `scores` was given the first already.

    Radix selection, 11 bits a pass, with as many programs a row as its context is long; the last pass writes in order
    of position because each program knows what the programs before it choose. Among equal scores the lowest position
    wins: relu makes plateaus of exact zeros, and two ranks, or prefill and decode, must choose the same tokens.

    `varying`: as in `scores`. What is compiled still differs by powers of two of `longest`.
    """
    rows, k = selected.shape
    block = min(block_l, triton.next_power_of_2(max(k, scores.shape[1])))
    grid = (rows, triton.cdiv(max(k, scores.shape[1]), block))
    if grid[1] > PARTS:
        raise ValueError(f"top_k: scores of {scores.shape[1]} positions; at most {PARTS * block} can be selected from")
    now, then = counts
    warps = max(1, min(16, block // 256))
    for step in range(1 if counted else 0, 3):
        _count[grid](
            scores, lengths, now, scores.stride(0), K=k, STEP=step, BINS=BINS, BL=block, num_warps=warps, **CHAINED,
        )  # fmt: skip
    (_emit_any if varying else _emit)[grid](
        scores, lengths, table, now, then, selected, scores.stride(0), table.stride(0), block_rows,
        K=k, BLOCK=block_size, BINS=BINS, PARTS=triton.next_power_of_2(grid[1]), BL=block, num_warps=warps, **CHAINED,
    )  # fmt: skip


def top_k_counts(rows: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """The work space of `top_k`, ready for the first call."""
    both = torch.zeros(2, rows, 3, BINS, dtype=torch.int32, device=device)
    return both[0], both[1]
