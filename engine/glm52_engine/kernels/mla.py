"""Latent attention over selected rows of the paged cache: query into the latent space, split attention, back out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm52_engine.kernels.cache_rows import Fp8Rows, Rows, group_of
from glm52_engine.kernels.chain import CHAINED, after_previous, for_any
from glm52_engine.kernels.rows import _rotated, split_rows

LOG2E = 1.4426950408889634
"""log2(e): the kernels' exponentials are powers of two."""


@triton.jit
def _absorb(
    b, kv_b, cos, sin, query, index_query,
    rows, b_split, b_row, head_width, nope, latent, index_at,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, INDEX: tl.constexpr, ROPE2: tl.constexpr,
    V: tl.constexpr, COPIES: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    part = tl.program_id(0)
    tile = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    m_in = m < rows
    m64 = m.to(tl.int64)
    pair = tl.arange(0, ROPE2)
    row_width = latent + 2 * ROPE2
    c_at = tile * BL + tl.arange(0, BL)
    k = tl.arange(0, BK)
    w_at = kv_b + (part * (nope + V) + k).to(tl.int64)[None, :] * latent + c_at[:, None]
    if (part < HEADS) & (tile * BL < latent):
        weight = tl.load(w_at, (k < nope)[None, :] & (c_at < latent)[:, None], other=0.0)
        q = tl.zeros((BK, BM), tl.float32)
        for split in tl.static_range(SPLITS):
            q_at = b + split * b_split + m64[None, :] * b_row + part * head_width + k[:, None]
            q += tl.load(q_at, m_in[None, :] & (k < nope)[:, None], other=0.0).to(tl.float32)
        acc = tl.dot(weight, q.to(weight.dtype))
        for copy in tl.static_range(COPIES):
            q_into = query + ((m64[None, :] * COPIES + copy) * HEADS + part) * row_width + c_at[:, None]
            tl.store(q_into, acc.to(query.dtype.element_ty), m_in[None, :] & (c_at < latent)[:, None])
    if tile * BL >= latent:  # the last program of a head rotates, beside the others
        mask = m_in[:, None] & (pair < ROPE2)[None, :]
        c = tl.load(cos + m64[:, None] * ROPE2 + pair[None, :], mask, other=0.0)
        s = tl.load(sin + m64[:, None] * ROPE2 + pair[None, :], mask, other=0.0)
        r = tl.arange(0, 2 * ROPE2)
        at = b + m64[:, None] * b_row + r[None, :]
        if part < HEADS:
            at += part * head_width + nope
        else:
            at += index_at + (part - HEADS) * INDEX
        both = tl.zeros((BM, 2 * ROPE2), tl.float32)
        for split in tl.static_range(SPLITS):
            both += tl.load(at + split * b_split, m_in[:, None], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(both, (BM, ROPE2, 2)))
        even, odd = _rotated(even, odd, c, s)
        both = tl.interleave(even, odd)
        if part < HEADS:
            for copy in tl.static_range(COPIES):
                end = query + ((m64[:, None] * COPIES + copy) * HEADS + part) * row_width + latent + r[None, :]
                tl.store(end, both.to(query.dtype.element_ty), m_in[:, None])
        else:
            dtype = index_query.dtype.element_ty
            into = index_query + (m64[:, None] * INDEX_HEADS + part - HEADS) * INDEX
            tl.store(into + r[None, :], both.to(dtype), m_in[:, None])
            d = tl.arange(0, INDEX)
            plain = m_in[:, None] & (d >= 2 * ROPE2)[None, :]
            x = tl.zeros((BM, INDEX), tl.float32)
            x_at = b + m64[:, None] * b_row + index_at + (part - HEADS) * INDEX + d[None, :]
            for split in tl.static_range(SPLITS):
                x += tl.load(x_at + split * b_split, plain, other=0.0).to(tl.float32)
            tl.store(into + d[None, :], x.to(dtype), plain)


_absorb_any = for_any(_absorb, "rows")


def absorb(
    b: torch.Tensor, kv_b: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, query: torch.Tensor,
    index_query: torch.Tensor | None, *, nope: int, value: int, copies: int = 1, block_l: int = 128, warps: int = 4,
    varying: bool = False,
) -> None:  # fmt: skip
    """Rotated queries in the latent space, and rotated index queries of a full layer.

    Every query is written `copies` times, for an attention that works on copies: query [T × copies, H, latent + rope].
    b [S, T, H × (nope + rope) (+ index_heads × index_dim)] split products; kv_b [H × (nope + value), latent];
    index_query [T, index_heads, index_dim]. In index heads the FIRST elements rotate.

    `varying`: T is another each time.
    """
    splits, rows, _ = b.shape
    _, heads, width = query.shape
    rope = 2 * cos.shape[1]
    latent = width - rope
    index_heads, index_dim = (0, 16) if index_query is None else (index_query.shape[1], index_query.shape[2])
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    block_l = min(block_l, latent)
    grid = (heads + index_heads, triton.cdiv(latent, block_l) + 1, triton.cdiv(rows, block_m))
    (_absorb_any if varying else _absorb)[grid](
        b, kv_b, cos, sin, query, query if index_query is None else index_query,
        rows, b.stride(0), b.stride(1), nope + rope, nope, latent, heads * (nope + rope),
        SPLITS=splits, HEADS=heads, INDEX_HEADS=max(1, index_heads), INDEX=index_dim, ROPE2=rope // 2, V=value,
        COPIES=copies, BM=block_m, BL=block_l, BK=triton.next_power_of_2(nope), num_warps=warps, **CHAINED,
    )  # fmt: skip


@triton.jit
def _widened(values, scales, there, BK: tl.constexpr, LATENT: tl.constexpr, GROUP: tl.constexpr):
    """FP8 values [BK, LATENT] times their groups' scales, float32; `scales` points at each row's first."""
    by = tl.load(scales + tl.arange(0, LATENT // GROUP)[None, :], there[:, None], other=0.0)
    groups = tl.reshape(values.to(tl.float32), (BK, LATENT // GROUP, GROUP))
    return tl.reshape(groups * by[:, :, None], (BK, LATENT))


@triton.jit
def _attend(
    query, pool, scales, rest, selected, lengths, out, peak, total,
    scale, per_split, selected_row, pool_row, scale_row, rest_row,
    HEADS: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.arange(0, BH)
    h_in = head < HEADS
    d = tl.arange(0, LATENT)
    r = tl.arange(0, ROPE)
    j = tl.arange(0, BK)
    width: tl.constexpr = LATENT + ROPE
    q_at = query + (row * HEADS + head)[:, None] * width
    q = tl.load(q_at + d[None, :], h_in[:, None], other=0.0)
    q_rope = tl.load(q_at + LATENT + r[None, :], h_in[:, None], other=0.0)
    count = tl.minimum(tl.load(lengths + row), K)
    first = split * per_split
    last = tl.minimum(first + per_split, count)
    best = tl.full((BH,), float("-inf"), tl.float32)
    norm = tl.zeros((BH,), tl.float32)
    acc = tl.zeros((BH, LATENT), tl.float32)
    for start in tl.range(first, last, BK, num_stages=STAGES):
        there = start + j < last
        slot = tl.load(selected + row * selected_row + start + j, there, other=-1)
        there = there & (slot >= 0)
        slot = slot.to(tl.int64)
        kv = tl.load(pool + slot[:, None] * pool_row + d[None, :], there[:, None], other=0.0)
        k_rope = tl.load(rest + slot[:, None] * rest_row + r[None, :], there[:, None], other=0.0).to(q.dtype)
        if FP8:
            kv = _widened(kv, scales + slot[:, None] * scale_row, there, BK, LATENT, GROUP)
        kv = kv.to(q.dtype)
        s = tl.dot(q, tl.trans(kv))
        s = tl.dot(q_rope, tl.trans(k_rope), s) * scale
        s = tl.where(there[None, :], s, float("-inf"))
        new = tl.maximum(best, tl.max(s, 1))
        new_safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - new_safe[:, None])
        by = tl.exp2(best - new_safe)
        norm = norm * by + tl.sum(p, 1)
        acc = tl.dot(p.to(kv.dtype), kv, acc * by[:, None])
        best = new
    if SPLITS == 1:
        acc = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
        at = out + (row * HEADS + head)[:, None] * LATENT + d[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), h_in[:, None])
    else:
        base = row * SPLITS + split
        at = out + (base * HEADS + head)[:, None] * LATENT + d[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), h_in[:, None])
        tl.store(peak + base * HEADS + head, best, h_in)
        tl.store(total + base * HEADS + head, norm, h_in)


try:
    from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
except ImportError:
    flash_mla_sparse_fwd = flash_mla_with_kvcache = get_mla_metadata = None

FLASH_PAGE = 64
"""Rows of a page of FlashMLA's FP8 kernel: a row number is what it makes of page and offset, so any number will do."""


def flash_usable(heads: int, latent: int, rope: int, stored: torch.dtype, device: torch.device) -> bool:
    """Whether FlashMLA is installed and made for this shape, for rows `stored` so, and for this card (Hopper)."""
    if flash_mla_sparse_fwd is None or device.type != "cuda" or (heads % 64, latent, rope) != (0, 512, 64):
        return False
    if stored not in (torch.bfloat16, torch.float8_e4m3fn):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def attend_flash(
    query: torch.Tensor, pool: torch.Tensor, selected: torch.Tensor, out: torch.Tensor, parts: int, *, scale: float
) -> torch.Tensor:  # fmt: skip
    """`attend` by the FlashMLA package: query [T × S, H, latent + rope], each query S times, one for each part of K.

    A part is one query with K / S rows to look at: that fills the multiprocessors when there are few queries. The
    result is in `out`, or of one part in a tensor that the package allocates.
    """
    rows, heads, latent = out.shape
    indices = selected.view(rows * parts, 1, selected.shape[1] // parts)
    partial, _, lse = flash_mla_sparse_fwd(query, pool.unsqueeze(1), indices, scale, latent, use_legacy=True)
    if parts == 1:
        return partial
    _merge_lse[(rows, heads)](
        partial, lse, out, HEADS=heads, SPLITS=parts, LATENT=latent, LOG2E=LOG2E, num_warps=2, **CHAINED,
    )  # fmt: skip
    return out


class FlashFp8:
    """`attend` by FlashMLA on FP8 rows. It splits a row's K by itself, by a plan that is made at the first call.

    The plan depends on shapes alone, so one object serves every layer of a step, and a graph of it.
    """

    def __init__(self) -> None:
        self._plan = get_mla_metadata()[0]

    def attend(
        self, query: torch.Tensor, pages: torch.Tensor, selected: torch.Tensor, *, latent: int, scale: float
    ) -> torch.Tensor:
        """query [T, H, latent + rope]; pages uint8 [pages, FLASH_PAGE, 1, row bytes]; result [T, H, latent]."""
        out, _ = flash_mla_with_kvcache(
            query.unsqueeze(1), pages, None, None, latent, self._plan, None, scale, False, True,
            selected.unsqueeze(1), use_legacy=True,
        )  # fmt: skip
        attended: torch.Tensor = out.squeeze(1)
        return attended


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table"])
def _widen_rows(
    pool, scales, rest, table, out, pool_row, scale_row, rest_row, table_row, block_rows,
    BLOCK: tl.constexpr, BK: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    sequence = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0) // tl.cdiv(BLOCK, BK)
    offset = tl.program_id(0) % tl.cdiv(BLOCK, BK) * BK + tl.arange(0, BK)
    there = offset < BLOCK
    slot = tl.load(table + sequence * table_row + page).to(tl.int64) * block_rows + offset
    d = tl.arange(0, LATENT)
    r = tl.arange(0, ROPE)
    kv = tl.load(pool + slot[:, None] * pool_row + d[None, :], there[:, None], other=0.0)
    kv = _widened(kv, scales + slot[:, None] * scale_row, there, BK, LATENT, GROUP)
    k_rope = tl.load(rest + slot[:, None] * rest_row + r[None, :], there[:, None], other=0.0)
    pages = tl.num_programs(0) // tl.cdiv(BLOCK, BK)
    into = out + ((sequence * pages + page) * BLOCK + offset)[:, None] * (LATENT + ROPE)
    tl.store(into + d[None, :], kv.to(out.dtype.element_ty), there[:, None])
    tl.store(into + LATENT + r[None, :], k_rope.to(out.dtype.element_ty), there[:, None])


def widen_rows(pool: Fp8Rows, table: torch.Tensor, out: torch.Tensor, *, block_size: int, block_rows: int) -> None:
    """Rows of whole sequences from FP8: out [S, pages × block_size, latent + rope], in order of position.

    table int32 [S, pages]. What stands in blocks behind a sequence's end is brought along and never looked at.
    """
    sequences, pages = table.shape
    values, scales, rest = split_rows(pool, 0)
    latent, block = values.shape[1], min(16, block_size)
    _widen_rows[(pages * triton.cdiv(block_size, block), sequences)](
        values, scales, rest, table, out, values.stride(0), scales.stride(0), rest.stride(0), table.stride(0),
        block_rows, BLOCK=block_size, BK=block, LATENT=latent, ROPE=rest.shape[1], GROUP=group_of(latent),
        num_warps=4, **CHAINED,
    )  # fmt: skip


@triton.jit
def _merge_lse(
    parts, lse, out, HEADS: tl.constexpr, SPLITS: tl.constexpr, LATENT: tl.constexpr, LOG2E: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, LATENT)
    s = tl.arange(0, SPLITS)
    base = (row * SPLITS + s) * HEADS + head
    m = tl.load(lse + base) * LOG2E  # the package's are natural logarithms
    # A part with nothing to look at says +inf or -inf, depending on the kernel.
    m = tl.where((m == float("inf")) | (m != m), float("-inf"), m)
    top = tl.max(m, 0)
    by = tl.where(m == float("-inf"), 0.0, tl.exp2(m - tl.where(top == float("-inf"), 0.0, top)))
    by = by / tl.sum(by, 0)
    acc = tl.load(parts + base[:, None] * LATENT + d[None, :], (by > 0.0)[:, None], other=0.0).to(tl.float32)
    tl.store(out + (row * HEADS + head) * LATENT + d, tl.sum(acc * by[:, None], 0).to(out.dtype.element_ty))


@triton.jit
def _merge(
    parts,
    peak,
    total,
    out,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    LATENT: tl.constexpr,
    BS: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, LATENT)
    s = tl.arange(0, BS)
    base = (row * SPLITS + s) * HEADS + head
    m = tl.load(peak + base, s < SPLITS, other=float("-inf"))
    n = tl.load(total + base, s < SPLITS, other=0.0)
    top = tl.max(m, 0)
    by = tl.where(m == float("-inf"), 0.0, tl.exp2(m - tl.where(top == float("-inf"), 0.0, top)))
    acc = tl.load(parts + base[:, None] * LATENT + d[None, :], (by > 0.0)[:, None], other=0.0).to(tl.float32)
    norm = tl.sum(n * by, 0)
    acc = tl.sum(acc * by[:, None], 0) / tl.where(norm == 0.0, 1.0, norm)
    tl.store(out + (row * HEADS + head) * LATENT + d, acc.to(out.dtype.element_ty))


def attention_splits(rows: int, k: int, *, processors: int = 132, block: int = 64) -> int:
    """A power of two that gives every multiprocessor about one program, none shorter than two tiles."""
    splits = 1
    while rows * splits * 2 <= processors and k // (splits * 2) >= 2 * block:
        splits *= 2
    return splits


def attend(
    query: torch.Tensor, pool: Rows, selected: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor,
    work: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None, *, scale: float, block: int = 32, warps: int = 8,
    stages: int = 2,
) -> None:  # fmt: skip
    """Attention of each query to its selected rows: out [T, H, latent].

    query [T, H, latent + rope]; pool [rows, latent + rope] the flat cache of this layer, or in FP8; selected int32
    [T, K], -1 for none, valid ones first; lengths int32 [T]. `work` = (parts float32 [T, S, H, latent], peak, total
    float32 [T, S, H]) when the K rows are split over S programs.
    """
    rows, heads, width = query.shape
    latent, k = out.shape[2], selected.shape[1]
    splits = 1 if work is None else work[0].shape[1]
    parts, peak, total = (out, out, out) if work is None else work
    values, scales, rest = split_rows(pool, latent)
    _attend[(rows, splits)](
        query, values, scales, rest, selected, lengths, parts, peak, total,
        scale * LOG2E, triton.cdiv(k, splits), selected.stride(0), values.stride(0), scales.stride(0), rest.stride(0),
        HEADS=heads, K=k, SPLITS=splits, BH=max(16, triton.next_power_of_2(heads)), BK=block,
        LATENT=latent, ROPE=width - latent, FP8=isinstance(pool, Fp8Rows), GROUP=group_of(latent), STAGES=stages,
        num_warps=warps, **CHAINED,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows, heads)](
            parts, peak, total, out, HEADS=heads, SPLITS=splits, LATENT=latent, BS=splits, num_warps=2, **CHAINED,
        )  # fmt: skip


@triton.jit
def _expand(
    attended, kv_b, out, rows, nope, latent,
    HEADS: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    head = tl.program_id(0)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    m64 = m.to(tl.int64)
    k = tl.arange(0, BK)
    acc = tl.zeros((BV, BM), tl.float32)
    for start in range(0, latent, BK):
        at = kv_b + (head * (nope + V) + nope + v).to(tl.int64)[:, None] * latent + start + k[None, :]
        weight = tl.load(at, (v < V)[:, None], other=0.0)
        at = attended + (m64[None, :] * HEADS + head) * latent + start + k[:, None]
        acc = tl.dot(weight, tl.load(at, (m < rows)[None, :], other=0.0), acc)
    at = out + (m64[None, :] * HEADS + head) * V + v[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), (m < rows)[None, :] & (v < V)[:, None])


_expand_any = for_any(_expand, "rows")


def expand(
    attended: torch.Tensor, kv_b: torch.Tensor, out: torch.Tensor, *, nope: int, block_v: int = 128, block_k: int = 128,
    warps: int = 4, stages: int = 3, varying: bool = False,
) -> None:  # fmt: skip
    """Values back out of the latent space: attended [T, H, latent], kv_b [H × (nope + V), latent] → out [T, H, V].

    `varying`: T is another each time.
    """
    rows, heads, latent = attended.shape
    value = out.shape[2]
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    block_v = min(block_v, triton.next_power_of_2(value))
    (_expand_any if varying else _expand)[(heads, triton.cdiv(value, block_v), triton.cdiv(rows, block_m))](
        attended, kv_b, out, rows, nope, latent,
        HEADS=heads, V=value, BM=block_m, BV=block_v, BK=min(block_k, latent), num_warps=warps,
        num_stages=stages, **CHAINED,
    )  # fmt: skip
