"""Rows of the KV cache as they are stored, in plain PyTorch: as they are, or in FP8 with scales.

FP8 is the layout of vLLM and FlashMLA. Of an MLA row the latent is e4m3 with one float32 scale for each 128 elements,
and behind them the rotated part is bfloat16: its few elements carry positions, which 3 bits of mantissa would blur. An
index key is e4m3 with one scale.

Scales are powers of two, rounded up. An e4m3 number is as exact under one power of two as under another, multiplying by
one rounds nothing, and kernels that keep only a scale's exponent read the same values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUP = 128
"""Elements that share a scale; a row of fewer has one."""

LEAST = 1e-4
"""A group's largest magnitude counts at least as much: the scale of a group of zeros has to be a number."""


def group_of(width: int) -> int:
    """Elements that share a scale in a row of `width`."""
    return min(GROUP, width)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Views of a pool, all with the same leading dimensions (blocks, and tokens of a block).

    values float8_e4m3fn [.., N]; scales float32 [.., N / group]; rest bfloat16 [.., R], or None for an index key.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rest: torch.Tensor | None


Rows = torch.Tensor | Fp8Rows
"""A layer's rows [blocks, block_size, width]."""


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., N] → values float8_e4m3fn [.., N] and scales float32 [.., N / group], x ≈ values × scale."""
    groups = x.float().unflatten(-1, (-1, group_of(x.shape[-1])))
    # The least power of two by which the largest magnitude comes down to e4m3's 448 = 1.75 × 2^8, by its bits: a
    # logarithm would differ in the last place between processors, and then so would the KV of two engines.
    bits = groups.abs().amax(-1).clamp_(min=LEAST).view(torch.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    scales = (exponent << 23).view(torch.float32)
    values = (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return values.flatten(-2), scales


def store(rows: Rows, blocks: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> None:
    """Write x [T, width] to the tokens (block, offset), int64 [T] each."""
    if isinstance(rows, torch.Tensor):
        rows[blocks, offsets] = x.to(rows.dtype)
        return
    width = rows.values.shape[-1]
    values, scales = quantise(x[..., :width])
    # Not every device indexes FP8 itself.
    rows.values.view(torch.uint8)[blocks, offsets] = values.view(torch.uint8)
    rows.scales[blocks, offsets] = scales
    if rows.rest is not None:
        rows.rest[blocks, offsets] = x[..., width:].to(rows.rest.dtype)


def load(rows: Rows, at: tuple[torch.Tensor, ...], dtype: torch.dtype) -> torch.Tensor:
    """rows[at] in `dtype`: `at` has int64 tensors for the blocks, or for blocks and offsets."""
    if isinstance(rows, torch.Tensor):
        return rows[at].to(dtype)
    values = rows.values.view(torch.uint8)[at].view(torch.float8_e4m3fn).float()
    groups = values.unflatten(-1, (-1, group_of(values.shape[-1])))
    wide = (groups * rows.scales[at].unsqueeze(-1)).flatten(-2).to(dtype)
    return wide if rows.rest is None else torch.cat((wide, rows.rest[at].to(dtype)), dim=-1)
