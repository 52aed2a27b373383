"""Per-row kernels between the matrix products: residual and norms, rotation, KV rows into the paged cache, argmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from glm52_engine.kernels.cache_rows import LEAST, Fp8Rows, Rows, group_of
from glm52_engine.kernels.chain import CHAINED, after_previous, for_any

K_NORM_EPS = 1e-6


@triton.jit
def _add_norm(
    hidden, parts, weight, normed, dim, part_row, part_step, eps,
    PARTS: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < dim
    at = hidden + row * dim + d
    total = tl.load(at, inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.zeros((BD,), tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(parts + row * part_row + part * part_step + d, inside, other=0.0).to(tl.float32)
        dtype = hidden.dtype.element_ty
        total = (total + added.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(at, total.to(dtype), inside)
    by = tl.rsqrt(tl.sum(total * total, 0) / dim + eps)
    scaled = (total * by).to(normed.dtype.element_ty) * tl.load(weight + d, inside, other=0.0)
    tl.store(normed + row * dim + d, scaled.to(normed.dtype.element_ty), inside)


def add_norm(
    hidden: torch.Tensor, parts: torch.Tensor | None, weight: torch.Tensor, normed: torch.Tensor, eps: float
) -> None:
    """hidden += sum of parts (in place); normed = RMS norm of the sum × weight.

    hidden, normed [T, D]; parts [S, T, D] in any strides with D contiguous (split products, or experts' shares), or
    None; statistics and sums in float32, the residual rounded to its own dtype as the reference does.
    """
    rows, dim = hidden.shape
    count = 0 if parts is None else parts.shape[0]
    given = hidden if parts is None else parts
    row, step = (0, 0) if parts is None else (parts.stride(1), parts.stride(0))
    block = triton.next_power_of_2(dim)
    _add_norm[(rows,)](
        hidden, given, weight, normed, dim, row, step, eps,
        PARTS=count, BD=block, num_warps=max(1, min(16, block // 512)), **CHAINED,
    )  # fmt: skip


@triton.jit
def _begin(
    tokens, positions, embed, hidden, cos, sin, table, slots, active, frequencies, turn,
    dim, table_row, block_size, block_rows,
    ROPE2: tl.constexpr, BD: tl.constexpr, TURNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if TURNS:  # noqa: SIM102  # known when the kernel is compiled; the row is not
        if row == 0:
            tl.store(turn, 1 - tl.load(turn))
    d = tl.arange(0, BD)
    inside = d < dim
    token = tl.load(tokens + row)
    tl.store(hidden + row * dim + d, tl.load(embed + token.to(tl.int64) * dim + d, inside, other=0.0), inside)
    position = tl.load(positions + row)
    pair = tl.arange(0, ROPE2)
    angle = position.to(tl.float32) * tl.load(frequencies + pair)
    tl.store(cos + row * ROPE2 + pair, tl.cos(angle))
    tl.store(sin + row * ROPE2 + pair, tl.sin(angle))
    block = tl.load(table + row * table_row + position // block_size)
    slot = block * block_rows + position % block_size
    # Padding rows write nowhere: a stale position would overwrite the KV of whoever owns that block now.
    tl.store(slots + row, tl.where(row < tl.load(active), slot, -1))


# A prompt's table begins wherever its seat's does, and is as wide as its context.
_begin_any = for_any(_begin, "table_row", alignment=["table"])


def begin(
    tokens: torch.Tensor, positions: torch.Tensor, embed: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, active: torch.Tensor, frequencies: torch.Tensor,
    *, block_size: int, block_rows: int, turn: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Embedding, rotation angles and the KV slot of every row; `turn` (int32 scalar, 0 or 1) becomes the other one,
    which only a step of fixed shape has.

    tokens, positions int64 [T]; table int32 [T, most blocks]; slots int32 [T]: row of the pool where the token's KV
    goes, -1 for rows at or behind `active` (int32 scalar tensor); cos, sin float32 [T, rope/2].
    """
    rows, dim = hidden.shape
    (_begin_any if turn is None else _begin)[(rows,)](
        tokens, positions, embed, hidden, cos, sin, table, slots, active, frequencies, active if turn is None else turn,
        dim, table.stride(0), block_size, block_rows,
        ROPE2=cos.shape[1], BD=triton.next_power_of_2(dim), TURNS=turn is not None, num_warps=8, **CHAINED,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step's rows go: slots int32 [T], cos/sin float32 [T, rope/2], `pool` this layer's MLA rows.

    Row s of the cache is `pool[s]` of the flat view [rows, latent + rope] (or `Fp8Rows` of such views). Index keys lie
    in blocks: `key_slots` int32 [T] numbers `block_rows` for each, of which the first `block_size` are tokens. None:
    both are in one cache, and it is `slots`. -1: the row is written nowhere.
    """

    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    pool: Rows
    block_rows: int
    key_slots: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Norms:
    """Weights of the query and KV latent norms."""

    q: torch.Tensor
    kv: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexRow:
    """Of a full layer: the key norm, the paged keys [blocks, block_size, dim], and head weights float32 [T, heads]."""

    weight: torch.Tensor
    bias: torch.Tensor
    keys: Rows
    head_weights: torch.Tensor
    head_scale: float


@triton.jit
def _rotated(even, odd, cos, sin):
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def _scale_bits(largest, LEAST: tl.constexpr):
    """The biased exponent of the power of two that brings a magnitude down to e4m3's largest; see `cache_rows`."""
    bits = tl.maximum(largest, LEAST).to(tl.int32, bitcast=True)
    return (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def _power(exponent):
    """float32 of a biased exponent: 254 - exponent gives the exact inverse."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _latents(
    a, slots, key_slots, cos, sin, q_weight, kv_weight, k_weight, k_bias, q_out, pool, scales, rest, keys, key_scales,
    head_weights, a_row, a_split, pool_row, scale_row, rest_row, key_block, key_row, key_scale_block, block_rows,
    q_dim, latent, eps, k_eps, head_scale,
    SPLITS: tl.constexpr, ROPE2: tl.constexpr, INDEX: tl.constexpr, HEADS: tl.constexpr, FULL: tl.constexpr,
    BQ: tl.constexpr, BL: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    a += row * a_row
    slot = tl.load(slots + row).to(tl.int64)
    pair = tl.arange(0, ROPE2)
    c = tl.load(cos + row * ROPE2 + pair)
    s = tl.load(sin + row * ROPE2 + pair)
    if part == 0:
        q_at = tl.arange(0, BQ)
        q = tl.zeros((BQ,), tl.float32)
        for split in tl.static_range(SPLITS):
            q += tl.load(a + split * a_split + q_at, q_at < q_dim, other=0.0).to(tl.float32)
        q_by = tl.rsqrt(tl.sum(q * q, 0) / q_dim + eps)
        q_normed = (q * q_by).to(q_out.dtype.element_ty) * tl.load(q_weight + q_at, q_at < q_dim, other=0.0)
        tl.store(q_out + row * q_dim + q_at, q_normed.to(q_out.dtype.element_ty), q_at < q_dim)
    elif part == 1:
        l_at = tl.arange(0, BL)
        kv = tl.zeros((BL,), tl.float32)
        even = tl.zeros((ROPE2,), tl.float32)
        odd = tl.zeros((ROPE2,), tl.float32)
        for split in tl.static_range(SPLITS):
            from_kv = a + split * a_split + q_dim
            kv += tl.load(from_kv + l_at, l_at < latent, other=0.0).to(tl.float32)
            even += tl.load(from_kv + latent + 2 * pair).to(tl.float32)
            odd += tl.load(from_kv + latent + 2 * pair + 1).to(tl.float32)
        kv_by = tl.rsqrt(tl.sum(kv * kv, 0) / latent + eps)
        kv_normed = (kv * kv_by).to(q_out.dtype.element_ty) * tl.load(kv_weight + l_at, l_at < latent, other=0.0)
        even, odd = _rotated(even, odd, c, s)
        kv_real = tl.where(slot >= 0, latent, 0)
        if FP8:
            groups = tl.reshape(kv_normed.to(tl.float32), (BL // GROUP, GROUP))
            exponent = _scale_bits(tl.max(tl.abs(groups), 1), LEAST)
            kv_normed = tl.reshape(groups * _power(254 - exponent)[:, None], (BL,))
            group = tl.arange(0, BL // GROUP)
            tl.store(scales + slot * scale_row + group, _power(exponent), group * GROUP < kv_real)
        tl.store(pool + slot * pool_row + l_at, kv_normed.to(pool.dtype.element_ty), l_at < kv_real)
        into = rest + slot * rest_row + 2 * pair
        tl.store(into, even.to(rest.dtype.element_ty), pair < kv_real)
        tl.store(into + 1, odd.to(rest.dtype.element_ty), pair < kv_real)
    elif FULL:
        slot = tl.load(key_slots + row).to(tl.int64)
        d = tl.arange(0, INDEX)
        head = tl.arange(0, HEADS)
        first = tl.zeros((ROPE2,), tl.float32)
        second = tl.zeros((ROPE2,), tl.float32)
        key = tl.zeros((INDEX,), tl.float32)
        w = tl.zeros((HEADS,), tl.float32)
        for split in tl.static_range(SPLITS):
            from_key = a + split * a_split + q_dim + latent + 2 * ROPE2
            key += tl.load(from_key + d).to(tl.float32)
            first += tl.load(from_key + 2 * pair).to(tl.float32)
            second += tl.load(from_key + 2 * pair + 1).to(tl.float32)
            w += tl.load(from_key + INDEX + head).to(tl.float32)
        mean = tl.sum(key, 0) / INDEX
        by = tl.rsqrt(tl.sum((key - mean) * (key - mean), 0) / INDEX + k_eps)
        key = (key - mean) * by * tl.load(k_weight + d).to(tl.float32) + tl.load(k_bias + d).to(tl.float32)
        first = (first - mean) * by * tl.load(k_weight + 2 * pair).to(tl.float32)
        first += tl.load(k_bias + 2 * pair).to(tl.float32)
        second = (second - mean) * by * tl.load(k_weight + 2 * pair + 1).to(tl.float32)
        second += tl.load(k_bias + 2 * pair + 1).to(tl.float32)
        first, second = _rotated(first, second, c, s)
        key_real = tl.where(slot >= 0, INDEX, 0)
        key_into = keys + (slot // block_rows) * key_block + (slot % block_rows) * key_row
        if FP8:
            # What the reference quantises is rounded to the model's dtype before.
            dtype = q_out.dtype.element_ty
            key = tl.where(d >= 2 * ROPE2, key, 0.0).to(dtype).to(tl.float32)
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
            key_exponent = _scale_bits(tl.maximum(largest, tl.max(tl.abs(key), 0)), LEAST)
            by = _power(254 - key_exponent)
            key, first, second = key * by, first * by, second * by
            key_scale = key_scales + (slot // block_rows) * key_scale_block + slot % block_rows
            tl.store(key_scale, _power(key_exponent), slot >= 0)
        tl.store(key_into + d, key.to(keys.dtype.element_ty), (d >= 2 * ROPE2) & (d < key_real))
        tl.store(key_into + 2 * pair, first.to(keys.dtype.element_ty), pair < key_real)
        tl.store(key_into + 2 * pair + 1, second.to(keys.dtype.element_ty), pair < key_real)
        tl.store(head_weights + row * HEADS + head, w * head_scale)


def latents(
    a: torch.Tensor, q_out: torch.Tensor, place: Place, norms: Norms, index: IndexRow | None, *, eps: float
) -> None:  # fmt: skip
    """From the first product of an attention layer: normed query latent, KV row and index key into the paged cache.

    a [S, T, q_dim + latent + rope (+ index_dim + index_heads)] split products; q_out [T, q_dim].
    """
    splits, rows, _ = a.shape
    latent = norms.kv.shape[0]
    pool, scales, rest = split_rows(place.pool, latent)
    no = IndexRow(norms.kv, norms.kv, pool[:1].unsqueeze(0), place.cos, 0.0)
    key = no if index is None else index
    keys, key_scales, _ = split_rows(key.keys, 0)
    _latents[(rows, 2 if index is None else 3)](
        a, place.slots, place.slots if place.key_slots is None else place.key_slots, place.cos, place.sin,
        norms.q, norms.kv, key.weight, key.bias, q_out, pool, scales, rest,
        keys, key_scales, key.head_weights, a.stride(1), a.stride(0), pool.stride(0), scales.stride(0),
        rest.stride(0), keys.stride(0), keys.stride(1), key_scales.stride(0), place.block_rows,
        q_out.shape[1], latent, eps, K_NORM_EPS, key.head_scale,
        SPLITS=splits, ROPE2=place.cos.shape[1], INDEX=16 if index is None else keys.shape[-1],
        HEADS=key.head_weights.shape[1], FULL=index is not None, BQ=triton.next_power_of_2(q_out.shape[1]),
        BL=triton.next_power_of_2(latent), FP8=isinstance(place.pool, Fp8Rows), GROUP=group_of(latent), LEAST=LEAST,
        num_warps=4, **CHAINED,
    )  # fmt: skip


def split_rows(rows: Rows, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first `width` elements of each row, their scales, and the other elements, as kernels take them.

    Of plain rows the scales are some tensor that is never read.
    """
    if isinstance(rows, torch.Tensor):
        return rows, rows, rows[..., width:]
    return rows.values, rows.scales, rows.values if rows.rest is None else rows.rest


@triton.jit
def _next(
    logits, tokens, positions, lengths, out, vocab, row_stride, active, turn, rows,
    BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BV,), float("-inf"), tl.float32)
    where = tl.zeros((BV,), tl.int32)
    wrong = tl.zeros((BV,), tl.int32)
    v = tl.arange(0, BV)
    for start in range(0, vocab, BV):
        x = tl.load(logits + row * row_stride + start + v, start + v < vocab, other=float("-inf")).to(tl.float32)
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, start + v, where)
        wrong |= (x != x).to(tl.int32)
    top = tl.max(best, 0)
    token = tl.min(tl.where(best == top, where, vocab), 0)
    token = tl.where((tl.max(wrong, 0) > 0) | (tl.abs(top) == float("inf")), -1, token)
    tl.store(out + tl.load(turn) * rows + row, token)
    if row < tl.load(active):
        # A row that is no number goes on with a token that exists: the host ends it, maybe one step too late.
        tl.store(tokens + row, tl.maximum(token, 0).to(tokens.dtype.element_ty))
        tl.store(positions + row, tl.load(positions + row) + 1)
        tl.store(lengths + row, tl.load(lengths + row) + 1)


def feed(
    logits: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
    active: torch.Tensor, turn: torch.Tensor, *, vocab_bound: int,
) -> None:  # fmt: skip
    """Greedy token of every row (the lowest id wins ties) and the inputs of the next step, on the device.

    logits [T, vocab]; out int32 [2, T], of which row `turn` (int32 scalar) is written, -1 where the greatest logit is
    infinite or any is NaN; tokens, positions, lengths advance in place where the row is active.
    """
    _next[(logits.shape[0],)](
        logits,
        tokens,
        positions,
        lengths,
        out,
        vocab_bound,
        logits.stride(0),
        active,
        turn,
        logits.shape[0],
        BV=16384,
        num_warps=16,
        **CHAINED,
    )
