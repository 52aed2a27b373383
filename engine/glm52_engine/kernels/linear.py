"""Products of a few rows with a large matrix: decode reads every weight once, so bytes in flight are all that counts.

The weights are the left operand (`out^T = W x^T`), so that the matrix units work on 64 or more of their rows while
the few tokens fill the narrow side; splitting K gives every multiprocessor a share of a matrix with few rows. Splits
are summed by whoever reads the result (`rows.py`): in a fixed order, so that a step is deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm52_engine.kernels.chain import CHAINED, after_previous

BLOCK = 128
"""Rows and columns that share one scale in an FP8 block checkpoint."""


@triton.jit
def fp8_dot(pairs, token):
    """Weights float8_e4m3fn, two at a time as int16 [N, K / 2], @ token [K, M] in float32.

    Weights are not converted to bfloat16: the card's instructions for that give an eighth of the numbers that memory
    does. Their bits are shifted into bfloat16's places, the sign to the top and the others below it. That makes each
    number 2^-120 of what it is, subnormal ones too, and the product is multiplied by 2^120. Two numbers of an int16 go
    into two products, of the even and of the odd columns: to bring them into a row again costs more than all of this.
    NaN, which no checkpoint holds, becomes a number.
    """
    K: tl.constexpr = token.shape[0]
    M: tl.constexpr = token.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(token, (K // 2, 2, M)), (0, 2, 1)))
    if token.dtype == tl.bfloat16:
        first: tl.constexpr = """{ .reg .b32 s, t;
            shl.b32 s, $1, 8; shl.b32 t, $1, 4; and.b32 t, t, 0x07F007F0; lop3.b32 $0, s, 0x80008000, t, 0xEA; }"""
        second: tl.constexpr = """{ .reg .b32 t;
            shr.u32 t, $1, 4; and.b32 t, t, 0x07F007F0; lop3.b32 $0, $1, 0x80008000, t, 0xEA; }"""
        low = tl.inline_asm_elementwise(first, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2)
        high = tl.inline_asm_elementwise(second, "=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=2)
        return tl.dot(high, odd, tl.dot(low, even)) * 1.329227995784916e36  # 2^120
    low = pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(token.dtype)
    high = (pairs >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(token.dtype)
    return tl.dot(high, odd, tl.dot(low, even))


@triton.jit
def _linear(
    x, w, scale, out, rows, n_total, k_total, x_stride, out_split, out_row, splits,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    per = tl.cdiv(k_total, splits * BK) * BK
    first = split * per
    n_in, m_in = n < n_total, m < rows
    each: tl.constexpr = 2 if FP8 else 1
    k_w = tl.arange(0, BK // each)
    w_at = w + n.to(tl.int64)[:, None] * (k_total // each) + k_w[None, :]
    x_at = x + m[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(first, min(first + per, k_total), BK):
        k_in = start + k < k_total
        w_in = n_in[:, None] & (start // each + k_w < k_total // each)[None, :]
        weight = tl.load(w_at + start // each, w_in, other=0)
        token = tl.load(x_at + start, m_in[None, :] & k_in[:, None], other=0.0)
        if FP8:
            by = tl.load(scale + (n // 128) * tl.cdiv(k_total, 128) + start // 128, n_in, other=0.0)
            acc += fp8_dot(weight, token) * by[:, None]
        else:
            acc = tl.dot(weight, token, acc)
    at = out + split.to(tl.int64) * out_split + m[None, :] * out_row + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), n_in[:, None] & m_in[None, :])


def in_pairs(weight: torch.Tensor) -> torch.Tensor:
    """FP8 weights [.., K] as `fp8_dot` takes them, int16 [.., K / 2]; others as they are."""
    return weight.view(torch.int16) if weight.dtype == torch.float8_e4m3fn else weight


def splits_for(n: int, rows: int, *, processors: int = 132) -> int:
    """How often to split K so that every multiprocessor has work.

    Measured best on an H200: at least two programs each for few rows; two thirds of one for many, whose partial
    results are large.
    """
    tiles, wanted = (-(-n // 64), 2 * processors) if rows <= 16 else (-(-n // _block_n(n, rows)), processors * 2 // 3)
    splits = 1
    while tiles * splits < wanted and splits < 8:
        splits *= 2
    return splits


def _block_n(n: int, rows: int) -> int:
    """Rows of the weights a program takes: with many tokens, twice as many halve how often the tokens are read."""
    return 128 if rows > 16 and n >= 4096 else 64


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    stages: int | None = None,
    warps: int | None = None,
) -> None:
    """out[s] = split s of x @ weight.T.

    x [T, K] (rows may be strided), weight [N, K] contiguous (float8_e4m3fn with `scale` float32 [N/128, K/128], or
    x's dtype), out [S, T, N] contiguous: the sum over S is the product. S = 1 may have x's dtype, more want float32.
    """
    splits, rows, n = out.shape
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    # Measured on an H200; the scales of FP8 blocks want whole blocks.
    wide, short = scale is None and rows > 16, x.shape[1] <= 2048
    block_n = block_n or (_block_n(n, rows) if wide and not short else 64)
    block_k = block_k or (64 if wide and short else 128)
    stages = stages or (3 if scale is None and rows <= 16 else 4)
    warps = warps or (8 if block_n == 128 else 4)
    grid = (triton.cdiv(n, block_n), splits, triton.cdiv(rows, block_m))
    _linear[grid](
        x, in_pairs(weight), scale, out, rows, n, x.shape[1], x.stride(0), out.stride(0), out.stride(1), splits,
        BM=block_m, BN=block_n, BK=block_k, FP8=scale is not None,
        num_stages=stages, num_warps=warps, **CHAINED,
    )  # fmt: skip


@triton.jit
def _widen(w, scale, out, n_total, k_total, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    matrix = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = (n < n_total)[:, None] & (k < k_total)[None, :]
    at = (matrix * n_total + n)[:, None] * k_total + k[None, :]
    by = tl.load(scale + (matrix * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1))
    wide = tl.load(w + at, there, other=0.0).to(tl.float32) * by
    tl.store(out + at, wide.to(out.dtype.element_ty), there)


def widen(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """out = weight × scale of its block, rounded once; weight float8_e4m3fn [.., N, K], out the same in any dtype.

    scale float32 [.., ceil(N / 128), ceil(K / 128)]; all three contiguous.
    """
    n, k = weight.shape[-2:]
    grid = (triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK), weight.numel() // (n * k))
    _widen[grid](weight, scale, out, n, k, BLOCK=BLOCK, num_warps=8, **CHAINED)
