"""Products of prefill's experts: rows in the order of their experts, each times its expert's matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm52_engine.kernels import moe


def gated(both: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weight of the row × silu(first half) × second half; [N, 2 × inner] → [N, inner]."""
    out = both.new_empty(len(both), both.shape[1] // 2)
    moe.gate(both, weights, out)
    return out


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows [ends[e - 1], ends[e]) of x times weight[e].T; x [N, K], weight [E, O, K], ends int32 [E]."""
    if x.is_cuda:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    bounds = [0, *ends.tolist()]
    return torch.cat([F.linear(x[bounds[e] : bounds[e + 1]], weight[e]) for e in range(len(weight))])
