"""One decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.kernels.cache_rows import Rows
from glm52_engine.model.cache import LayerRows
from glm52_engine.model.indexer import Selection
from glm52_engine.model.mla import Attention
from glm52_engine.model.moe import FeedForward, Mlp
from glm52_engine.model.norm import rms_norm
from glm52_engine.model.rope import Rotation
from glm52_engine.model.step import Step
from glm52_engine.model.weights import under


class Layer:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        weights: Mapping[str, torch.Tensor],
        moe: Callable[[ModelSpec, Mapping[str, torch.Tensor]], FeedForward],
    ) -> None:
        """`weights`: this layer's tensors, named as in the checkpoint without `model.layers.N.`."""

        self._eps = spec.rms_norm_eps
        self._input_norm = weights["input_layernorm.weight"]
        self._mlp_norm = weights["post_attention_layernorm.weight"]
        self._attention = Attention(spec, under(weights, "self_attn."), full=spec.indexer_types[index] == "full")
        mlp = under(weights, "mlp.")
        self._mlp: FeedForward = moe(spec, mlp) if spec.is_moe(index) else Mlp(mlp)

    def forward(
        self,
        hidden: torch.Tensor,
        by: Rotation,
        step: Step,
        rows: LayerRows,
        index_keys: Rows | None,
        selection: Selection | None,
    ) -> tuple[torch.Tensor, Selection]:
        """hidden [T, hidden]; the selection of the last full layer goes in, that of this layer comes out."""
        normed = rms_norm(hidden, self._input_norm, self._eps)
        attended, selection = self._attention.forward(normed, by, step, rows, index_keys, selection)
        hidden = hidden + attended
        normed = rms_norm(hidden, self._mlp_norm, self._eps)
        return hidden + self._mlp.forward(normed), selection
