"""GLM-5.2 (`glm_moe_dsa`): rows of tokens in, logits out, KV in the pool. Knows nothing of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.kv.pools import Pool
from glm52_engine.model.cache import HotCache, LayerRows, PoolRows
from glm52_engine.model.indexer import Selection
from glm52_engine.model.layer import Layer
from glm52_engine.model.moe import FeedForward, Moe
from glm52_engine.model.norm import rms_norm
from glm52_engine.model.rope import inverse_frequencies, rotation
from glm52_engine.model.step import Step


class Model:
    """Read-only after construction: every rank of a process shares one."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        *,
        moe: Callable[[ModelSpec, Mapping[str, torch.Tensor]], FeedForward] = Moe,
    ) -> None:
        """`weights`: all tensors by their checkpoint name, as the loader returns them. `moe` makes a layer's mixture of
        experts; one that shares the experts with other ranks needs only its own in `weights`."""
        self.spec = spec
        self._embed = weights["model.embed_tokens.weight"]
        self._norm = weights["model.norm.weight"]
        self._head = weights["lm_head.weight"]
        self._frequencies = inverse_frequencies(spec.qk_rope_head_dim, spec.rope_theta)
        by_layer: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in weights.items():
            if name.startswith("model.layers."):
                _, _, index, rest = name.split(".", 3)
                by_layer[int(index)][rest] = tensor
        self.layers = [Layer(spec, index, by_layer[index], moe) for index in range(spec.num_hidden_layers)]

    @torch.inference_mode()
    def forward(
        self, step: Step, pool: Pool, hot: HotCache | None = None, *, trace: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Write the rows' KV to `pool`; return logits float32 [len(step.logit_rows), vocab_size].

        With `hot` attention reads the seats' hot buffers of that pool; the step then has no chunks. `trace` receives
        every layer's selected positions [T, K]: what the comparison with other engines looks at.
        """
        hidden = self._embed[step.tokens]
        by = rotation(step.positions, self._frequencies)
        selection: Selection | None = None
        rows: list[LayerRows] = [PoolRows(layer, step) for layer in pool.mla] if hot is None else hot.begin(step)
        for index, layer in enumerate(self.layers):
            hidden, selection = layer.forward(hidden, by, step, rows[index], pool.index.get(index), selection)
            if trace is not None:
                trace.append(selection.positions)
        if hot is not None:
            hot.end()
        hidden = rms_norm(hidden[step.logit_rows], self._norm, self.spec.rms_norm_eps)
        return F.linear(hidden, self._head).float()
