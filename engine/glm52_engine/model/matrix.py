"""Weights of the device's products: in the model's dtype, or in FP8 where blocks allow it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm52_engine.checkpoint.fp8 import Fp8Weight
from glm52_engine.checkpoint.quantization import FP8_BLOCK


@dataclass(frozen=True, slots=True)
class Matrix:
    """The right side of x @ weight.T, or a stack of such.

    weight [.., N, K] contiguous: values (`scale` None), or float8_e4m3fn with `scale` float32
    [.., ceil(N / 128), ceil(K / 128)].
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)


def fused(parts: Sequence[torch.Tensor | Fp8Weight], dtype: torch.dtype) -> Matrix:
    """One matrix of all parts' rows, [N1 + N2 + .., K].

    In FP8 where every part is and all but the last end with a whole block, else in `dtype`: a scale belongs to 128
    rows counted from row 0, and those of a part that begins inside a block would be two parts' at once.
    """
    pairs = [part for part in parts if isinstance(part, Fp8Weight)]
    if len(pairs) == len(parts) and all(len(pair.weight) % FP8_BLOCK == 0 for pair in pairs[:-1]):
        weight = torch.cat([pair.weight.view(torch.uint8) for pair in pairs])  # not every device joins FP8 itself
        return Matrix(weight.view(torch.float8_e4m3fn), torch.cat([pair.scale for pair in pairs]))
    return Matrix(torch.cat([part.dequantize(dtype) if isinstance(part, Fp8Weight) else part for part in parts]))


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """[M, N, K] of M matrices of one shape, all in FP8 or none."""
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    if not scales:
        return Matrix(torch.stack([matrix.weight for matrix in matrices]))
    weight = torch.stack([matrix.weight.view(torch.uint8) for matrix in matrices])
    return Matrix(weight.view(torch.float8_e4m3fn), torch.stack(scales))
