"""DSA indexer: which K tokens of its context each row attends to.

Only full layers have one. A shared layer takes over the selection of the last full layer before it: of the same step
and the same rows, which is why `Selection` is a value that travels through the layers, not a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.kernels.cache_rows import Rows, load, store
from glm52_engine.kernels.reference import index_scores, select_top_k
from glm52_engine.model.rope import Rotation, rotate
from glm52_engine.model.step import Step

_K_NORM_EPS = 1e-6
"""The key norm is a LayerNorm with bias and this eps, whatever rms_norm_eps says."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Where the chosen tokens of each row lie; all [T, K].

    positions int64, -1 for none; blocks/offsets int64, the row's own token where there is none, so that a gather
    through them always reads finite values; missing bool.
    """

    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    missing: torch.Tensor


class Indexer:
    """Weights and arithmetic of one full layer's indexer."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> None:
        self._heads, self._dim = spec.index_n_heads, spec.index_head_dim
        self._rope = spec.qk_rope_head_dim
        self._top_k = spec.index_topk
        self._wq_b = weights["wq_b.weight"]
        self._wk = weights["wk.weight"]
        self._k_norm = weights["k_norm.weight"], weights["k_norm.bias"]
        self._weights_proj = weights["weights_proj.weight"]

    def select(self, hidden: torch.Tensor, q_latent: torch.Tensor, by: Rotation, step: Step, keys: Rows) -> Selection:
        """Store the rows' own index keys in `keys` [num_blocks, block_size, dim], then choose from all of them.

        hidden [T, hidden], q_latent [T, q_lora_rank] (normed).
        """
        key = F.layer_norm(F.linear(hidden, self._wk), (self._dim,), *self._k_norm, _K_NORM_EPS)
        store(keys, step.blocks, step.offsets, self._rotate_first(key, by))
        if max([step.singles_length, *(chunk.length for chunk in step.chunks)]) <= self._top_k:
            return locate(_whole_context(step), step)
        query = F.linear(q_latent, self._wq_b).view(-1, self._heads, self._dim)
        query = self._rotate_first(query, by).float() * self._dim**-0.5
        # float32 before scaling: rounding the product first would flip near-ties.
        weights = F.linear(hidden, self._weights_proj).float() * self._heads**-0.5
        return locate(self._choose(query, weights, step, keys), step)

    def _rotate_first(self, x: torch.Tensor, by: Rotation) -> torch.Tensor:
        """The FIRST elements of an index head carry the position; in MLA heads it is the last ones."""
        return torch.cat((rotate(x[..., : self._rope], by), x[..., self._rope :]), dim=-1)

    def _choose(self, query: torch.Tensor, weights: torch.Tensor, step: Step, keys: Rows) -> torch.Tensor:
        """int64 [T, K] chosen positions: one padded batch for all single rows, then chunk by chunk."""
        parts = []
        if step.singles:
            rows = slice(0, step.singles)
            context = _gather_keys(keys, step.seats[rows], step.singles_length, step)
            scores = index_scores(query[rows].unsqueeze(1), weights[rows].unsqueeze(1), context).squeeze(1)
            parts.append(select_top_k(_causal(scores, step.positions[rows]), self._top_k))
        for chunk in step.chunks:
            rows = slice(chunk.first, chunk.first + chunk.rows)
            context = _gather_keys(keys, step.seats[rows][:1], chunk.length, step)
            scores = index_scores(query[rows].unsqueeze(0), weights[rows].unsqueeze(0), context).squeeze(0)
            parts.append(select_top_k(_causal(scores, step.positions[rows]), self._top_k))
        width = max(part.shape[1] for part in parts)
        return torch.cat([F.pad(part, (0, width - part.shape[1]), value=-1) for part in parts])


def locate(positions: torch.Tensor, step: Step) -> Selection:
    """Positions in the context → places in the pool, once for a full layer and all that share its selection."""
    missing = positions < 0
    # A stale or foreign row could hold NaN, and 0 × NaN is NaN: what is missing reads the row's own token instead.
    safe = torch.where(missing, step.positions.unsqueeze(1), positions)
    blocks = step.tables[step.seats.unsqueeze(1), safe // step.block_size]
    return Selection(positions, blocks, safe % step.block_size, missing)


def _whole_context(step: Step) -> torch.Tensor:
    """The selection when no context is longer than K: everything up to the row itself."""
    longest = max([step.singles_length, *(chunk.length for chunk in step.chunks)])
    every = torch.arange(longest).expand(len(step.positions), -1)
    return torch.where(every <= step.positions.unsqueeze(1), every, -1)


def _gather_keys(keys: Rows, seats: torch.Tensor, length: int, step: Step) -> torch.Tensor:
    """[len(seats), length, dim]: the first `length` index keys of each sequence; beyond its end, some finite ones."""
    blocks = step.tables[seats, : -(-length // step.block_size)]
    return load(keys, (blocks,), torch.float32).flatten(1, 2)[:, :length]


def _causal(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """-inf BEFORE the selection: masking afterwards would let future tokens take the places of past ones."""
    future = torch.arange(scores.shape[1]) > positions.unsqueeze(1)
    return scores.masked_fill_(future, -torch.inf)
