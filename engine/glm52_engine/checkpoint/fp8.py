"""Weights in FP8 with one scale per block of 128 × 128: value = weight × scale of its block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm52_engine.checkpoint.quantization import FP8_BLOCK


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A linear layer's weight as it is stored, both tensors on one device.

    weight float8_e4m3fn [out, in]; scale float32 [ceil(out / 128), ceil(in / 128)], finite and not negative.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The values in `dtype`, [out, in]."""
        out = torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device)
        dequantize_into(out, self.weight, self.scale)
        return out


def dequantize_into(out: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Write weight × scale to `out`; all three begin at the same block row, `out` and `weight` have the same shape.

    The product is taken in float32 and rounded once. Row of blocks by row of blocks, so what is held beside the
    arguments is 128 rows in float32 (and on CPU their indices and their product).
    """
    columns = weight.shape[1]
    for block, scales in enumerate(scale):
        rows = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        out[rows] = _float(weight[rows]) * scales.repeat_interleave(FP8_BLOCK)[:columns]


_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""Of every byte."""


def _float(weight: torch.Tensor) -> torch.Tensor:
    if weight.device.type != "cpu":
        return weight.float()
    # torch's own cast takes one element at a time on CPU: a table is five times as fast.
    return _VALUES.index_select(0, weight.flatten().view(torch.uint8).int()).view(weight.shape)
