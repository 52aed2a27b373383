"""Rotary position embedding, interleaved: elements (2i, 2i+1) form pair i. MLA and indexer use the same rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of every row's angles, float32 [T, dim / 2]; computed once a step, used by every layer."""

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(dim: int, theta: float) -> torch.Tensor:
    """float32 [dim / 2]: theta^(-2i/dim)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> Rotation:
    """positions int64 [T]."""
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies
    return Rotation(angles.cos(), angles.sin())


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """x [T, dim] or [T, heads, dim]; same shape and dtype out, pairs in place, rotated in float32."""
    cos, sin = (by.cos, by.sin) if x.dim() == 2 else (by.cos.unsqueeze(1), by.sin.unsqueeze(1))
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)
