"""Feed-forward parts: the gated MLP, and the mixture of experts with its sigmoid router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.model.weights import under


class FeedForward(Protocol):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] → [T, hidden], what the layer adds to the residual stream."""
        ...


class Mlp:
    """down(silu(gate(x)) × up(x))."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._gate, self._up = weights["gate_proj.weight"], weights["up_proj.weight"]
        self._down = weights["down_proj.weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, self._gate)) * F.linear(x, self._up), self._down)


class Router:
    """Which experts a token goes to and with what weight."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> None:
        self._spec = spec
        self._weight = weights["weight"].float()
        self._bias = weights["e_score_correction_bias"].float()

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] → experts int64 [T, k], weights float32 [T, k].

        The bias takes part in the choice only; the weights come from the unbiased scores. All of it in float32.
        """
        spec = self._spec
        scores = F.linear(x.float(), self._weight).sigmoid()
        choice = scores + self._bias
        if spec.n_group > 1:
            grouped = choice.unflatten(1, (spec.n_group, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(spec.topk_group, dim=-1).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            # -inf, not 0: biased scores may be negative, and 0 would then win.
            choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
        experts = choice.topk(spec.num_experts_per_tok, dim=-1).indices
        chosen = scores.gather(1, experts)
        if spec.norm_topk_prob:
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, chosen * spec.routed_scaling_factor


class Moe:
    """Routed experts plus the shared one, which every token passes and which is not scaled."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> None:
        self._router = Router(spec, under(weights, "gate."))
        self._shared = Mlp(under(weights, "shared_experts."))
        self._experts = [Mlp(under(weights, f"experts.{expert}.")) for expert in range(spec.n_routed_experts)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden]; tokens are sorted by expert, so an expert nobody chose costs nothing."""
        experts, weights = self._router.route(x)
        order = experts.flatten().argsort(stable=True)
        token = order // experts.shape[1]
        counts = experts.flatten().bincount(minlength=len(self._experts)).tolist()
        gathered = x[token]
        parts = [
            self._experts[expert].forward(rows) for expert, rows in enumerate(gathered.split(counts)) if rows.shape[0]
        ]
        weighted = torch.cat(parts) * weights.flatten()[order].unsqueeze(1).to(x.dtype)
        return self._shared.forward(x).index_add_(0, token, weighted)
