"""A mixture of experts whose experts lie on all ranks of a replica.

Every rank routes its own rows and gathers everybody's; computes what its own experts add to them; and sends each rank
the sums of that rank's rows back, where they are added in the order of the ranks. Two collectives a layer, of a shape
that all ranks know before: `bucket` rows each, of which the first `active_rows` are real.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.model.moe import Mlp, Router
from glm52_engine.model.weights import under
from glm52_engine.ranks.lane import Lane
from glm52_engine.ranks.spans import experts_of

_POISON = 0xFF
"""A byte of which every float is NaN and every id -1: a padding row that takes part must not go unseen."""


class ShardedMoe:
    """In the place of `model.moe.Moe`; `weights` needs the routed experts of this rank only."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, torch.Tensor], lane: Lane) -> None:
        self._lane = lane
        self._top_k = spec.num_experts_per_tok
        self._hidden = spec.hidden_size
        self._router = Router(spec, under(weights, "gate."))
        self._shared = Mlp(under(weights, "shared_experts."))
        self._own = self.experts(spec, lane)
        self._experts = [Mlp(under(weights, f"experts.{expert}.")) for expert in self._own]

    @staticmethod
    def experts(spec: ModelSpec, lane: Lane) -> range:
        """The routed experts of the lane's rank."""
        return experts_of(range(lane.rank, lane.rank + 1), world=lane.world, experts=spec.n_routed_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [active_rows of this rank, hidden]; an idle rank comes with no row and computes for the others."""
        lane, shape = self._lane, self._lane.shape
        experts, weights = self._router.route(x)
        # Decisions travel with their rows: two ranks that routed one row themselves might fall on different sides of a
        # tie, and one of its experts would then be computed twice or by nobody.
        everyone = lane.all_gather(self._padded(_packed(x, experts, weights), shape.bucket))
        rows = torch.cat([everyone[rank, :count] for rank, count in enumerate(shape.active_rows)])
        sums = self._computed(*_unpacked(rows, x.dtype, self._hidden, self._top_k))
        back = self._padded_parts(sums.split(shape.active_rows), shape.bucket)
        added = lane.all_to_all(back).sum(dim=0)[: x.shape[0]]
        return self._shared.forward(x) + added.to(x.dtype)

    def idle(self, like: torch.Tensor) -> None:
        """This layer's part of a step in which the rank has no rows; `like` gives dtype and device."""
        self.forward(like.new_empty(0, self._hidden))

    def _computed(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [rows, hidden]: the own experts' share of each row, added by ascending expert."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        mine = (experts >= self._own.start) & (experts < self._own.stop)
        token, place = mine.nonzero(as_tuple=True)
        if not len(token):
            return out
        chosen = experts[token, place] - self._own.start
        order = chosen.argsort(stable=True)
        token, place = token[order], place[order]
        counts = chosen.bincount(minlength=len(self._own)).tolist()
        parts = [
            self._experts[expert].forward(rows) for expert, rows in enumerate(x[token].split(counts)) if rows.shape[0]
        ]
        return out.index_add_(0, token, torch.cat(parts).float() * weights[token, place].unsqueeze(1))

    def _padded(self, rows: torch.Tensor, bucket: int) -> torch.Tensor:
        padded = rows.new_empty(bucket, *rows.shape[1:])
        if self._lane.debug:
            padded.fill_(_POISON)
        padded[: rows.shape[0]] = rows
        return padded

    def _padded_parts(self, parts: Sequence[torch.Tensor], bucket: int) -> torch.Tensor:
        back = parts[0].new_empty(len(parts), bucket, self._hidden)
        if self._lane.debug:
            back.fill_(torch.nan)
        for rank, part in enumerate(parts):
            back[rank, : part.shape[0]] = part
        return back


def _packed(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, hidden × size + k × 8]: one collective instead of three."""
    parts = (x, experts.to(torch.int32), weights)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpacked(
    rows: torch.Tensor, dtype: torch.dtype, hidden: int, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, experts, weights = rows.split((hidden * dtype.itemsize, top_k * 4, top_k * 4), dim=1)
    return (
        x.contiguous().view(dtype),
        experts.contiguous().view(torch.int32).long(),
        weights.contiguous().view(torch.float32),
    )
