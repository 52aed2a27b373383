"""Multi-head latent attention in its absorbed form over the paged cache, for prefill and decode alike.

The cache holds one row per token and layer: the normed latent and the rotated key part that all heads share. Keys and
values are never expanded; the query is carried into the latent space instead, and the result back out of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.kernels.cache_rows import Rows
from glm52_engine.kernels.reference import sparse_attention
from glm52_engine.model.cache import LayerRows
from glm52_engine.model.indexer import Indexer, Selection
from glm52_engine.model.norm import rms_norm
from glm52_engine.model.rope import Rotation, rotate
from glm52_engine.model.step import Step
from glm52_engine.model.weights import under

LATENT_NORM_EPS = 1e-6
"""eps of q_a_layernorm and kv_a_layernorm: that of the published model code; some engines take rms_norm_eps."""


class Attention:
    """Weights and arithmetic of one layer's attention."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, torch.Tensor], *, full: bool) -> None:
        self._heads, self._nope, self._rope = spec.num_attention_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim
        self._latent = spec.kv_lora_rank
        self._scale = spec.qk_head_dim**-0.5
        self._q_a, self._q_b = weights["q_a_proj.weight"], weights["q_b_proj.weight"]
        self._q_norm, self._kv_norm = weights["q_a_layernorm.weight"], weights["kv_a_layernorm.weight"]
        self._kv_a = weights["kv_a_proj_with_mqa.weight"]
        expand = weights["kv_b_proj.weight"].view(self._heads, self._nope + spec.v_head_dim, self._latent)
        self._to_latent = expand[:, : self._nope]
        self._from_latent = expand[:, self._nope :].transpose(1, 2)
        self._o = weights["o_proj.weight"]
        self._indexer = Indexer(spec, under(weights, "indexer.")) if full else None

    def forward(
        self,
        hidden: torch.Tensor,
        by: Rotation,
        step: Step,
        rows: LayerRows,
        index_keys: Rows | None,
        previous: Selection | None,
    ) -> tuple[torch.Tensor, Selection]:
        """hidden [T, hidden] → the same, and the selection that shared layers after this one reuse.

        `rows` and `index_keys` (full layers) are this layer's cache.
        """
        q_latent = rms_norm(F.linear(hidden, self._q_a), self._q_norm, LATENT_NORM_EPS)
        kv, shared_key = F.linear(hidden, self._kv_a).split((self._latent, self._rope), dim=-1)
        kv = rms_norm(kv, self._kv_norm, LATENT_NORM_EPS)
        rows.store(torch.cat((kv, rotate(shared_key, by)), dim=-1))

        if self._indexer is not None and index_keys is not None:
            selection = self._indexer.select(hidden, q_latent, by, step, index_keys)
        elif previous is not None:
            selection = previous
        else:
            raise RuntimeError("a shared layer came before any full layer: there is no selection to reuse")

        query = F.linear(q_latent, self._q_b).view(-1, self._heads, self._nope + self._rope)
        nope, rope = query.split((self._nope, self._rope), dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), self._to_latent).transpose(0, 1)
        attended = sparse_attention(
            torch.cat((absorbed, rotate(rope, by)), dim=-1),
            *rows.find(selection),
            selection.missing,
            latent=self._latent,
            scale=self._scale,
        )
        values = torch.bmm(attended.transpose(0, 1), self._from_latent).transpose(0, 1)
        return F.linear(values.flatten(1), self._o), selection
