"""The mixture of experts of a device's step where the experts lie on all ranks: in a decode step, and in prefill.

Both send rows with what their own rank chose for them, since a row that two ranks routed themselves might fall to
either side of a near-tie; and both add what comes back in the order of the ranks.
"""

from __future__ import annotations

import math

import torch

from glm52_engine.kernels import moe, spread
from glm52_engine.kernels.spread import Travelling
from glm52_engine.model.device_weights import DeviceWeights, LayerWeights
from glm52_engine.model.exchange import Exchange
from glm52_engine.model.grouped import gated, grouped_linear

_RANK_ROWS, _ALL_ROWS = 2048, 16384
"""Most rows of one rank and of all ranks that prefill exchanges at a time."""


class SpreadStep:
    """Of a decode step of `batch` rows a rank: the work buffers that all its layers use, and what they do with them.

    Any row may choose nothing but experts of one rank, so many rows on many ranks take hundreds of megabytes. Buffers
    of `larger`, a step of at least as many rows that never runs at the same time, serve this one too.
    """

    def __init__(
        self, weights: DeviceWeights, batch: int, exchange: Exchange, larger: SpreadStep | None = None
    ) -> None:
        spec, device, dtype = weights.spec, weights.embed.device, weights.embed.dtype
        dim, top, world = spec.hidden_size, spec.num_experts_per_tok, exchange.world
        self._spec, self._exchange = spec, exchange
        self.routed = spread.Routed(
            batch, weights.experts, spec.n_routed_experts, top, rank=exchange.rank, world=world, device=device
        )
        self._own = Travelling(1, batch, dim, top, dtype=dtype, device=device)
        self._everyone = Travelling(world, batch, dim, top, dtype=dtype, device=device)
        inner = next(layer.down.weight.shape[2] for layer in weights.layers if layer.gate is not None)
        slots = self.routed.slots

        def work(name: str, *shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            if larger is None:
                return torch.empty(shape, dtype=of, device=device)
            taken: torch.Tensor = getattr(larger, name)
            return taken.flatten()[: math.prod(shape)].view(shape)

        self._gated = work("_gated", world * batch, slots, inner)
        self._shares = work("_shares", world * batch, slots, dim)
        self._parts = work("_parts", world, batch, dim, of=torch.float32)
        self._back = work("_back", world, batch, dim, of=torch.float32)

    def run(self, layer: LayerWeights, normed: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """What each rank adds to the own rows, float32 [world, batch, hidden]; rows at or behind `active`: 0."""
        spec, everyone, routed = self._spec, self._everyone, self.routed
        assert layer.gate is not None
        assert layer.bias is not None
        spread.decide(
            normed, layer.gate, layer.bias, active, routed, self._own,
            scaling=spec.routed_scaling_factor, normalise=spec.norm_topk_prob,
        )  # fmt: skip
        self._exchange.gather(self._own.raw[0], everyone.raw)
        spread.assign(everyone, active, routed)
        moe.up(everyone.values, layer.up.weight, self._gated, routed, scale=layer.up.scale)
        moe.down(self._gated, layer.down.weight, self._shares, routed, scale=layer.down.scale)
        spread.add_up(self._shares, everyone, active, routed, self._parts.flatten(0, 1))
        self._exchange.swap(self._parts, self._back)
        return self._back


class SpreadPrefill:
    """Of a chunk of prompts. Ranks have different numbers of rows, and pad them to what all of them know."""

    def __init__(self, held: range, exchange: Exchange) -> None:
        self._held, self._exchange = held, exchange
        self._tile = max(1, min(_RANK_ROWS, _ALL_ROWS // exchange.world))

    def run(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor,
        up: torch.Tensor, down: torch.Tensor, bucket: int,
    ) -> torch.Tensor:  # fmt: skip
        """`shared` plus what all ranks' experts add to x, [T, D].

        x, shared [T, D]; experts, weights [T, top] of all ranks' experts; up [E, 2 × inner, D] and down [E, D, inner]
        of this rank's. T may be 0, and `bucket` is the same on all ranks.
        """
        out, world = torch.empty_like(x), self._exchange.world
        for first in range(0, bucket, self._tile):
            rows = min(self._tile, bucket - first)
            tile = slice(first, first + rows)
            back = self._exchanged(x[tile], experts[tile], weights[tile], up, down, rows)
            count = len(x[tile])
            if count:
                places = torch.arange(count, device=x.device)[:, None] + torch.arange(world, device=x.device) * rows
                moe.gather_sum(shared[tile], back.flatten(0, 1), places, out[tile])
        return out

    def _exchanged(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
        rows: int,
    ) -> torch.Tensor:  # fmt: skip
        """What each rank adds to x, float32 [world, rows, D]; of the rows behind x nothing is defined."""
        count, dim = x.shape
        world, top = self._exchange.world, experts.shape[1]
        own = Travelling(1, rows, dim, top, dtype=x.dtype, device=x.device)
        own.values[:count], own.weights[:count] = x, weights
        own.experts[:count], own.experts[count:] = experts, -1
        everyone = Travelling(world, rows, dim, top, dtype=x.dtype, device=x.device)
        self._exchange.gather(own.raw[0], everyone.raw)
        parts = torch.empty(world, rows, dim, dtype=torch.float32, device=x.device)
        self._compute(everyone, up, down, parts.flatten(0, 1))
        back = torch.empty_like(parts)
        self._exchange.swap(parts, back)
        return back

    def _compute(self, everyone: Travelling, up: torch.Tensor, down: torch.Tensor, out: torch.Tensor) -> None:
        """out[row] = sum of what this rank's experts add to the row."""
        chosen, held = everyone.experts, self._held
        mine = (chosen >= held.start) & (chosen < held.stop)
        local = torch.where(mine, chosen - held.start, len(held)).flatten()
        order = local.argsort(stable=True)
        numbers = torch.arange(len(held), dtype=local.dtype, device=local.device)
        ends = torch.searchsorted(local[order], numbers, right=True).int()
        # Waits for the device: room for every row of every rank would be the ranks' number times as much.
        count = int(ends[-1]) if len(held) else 0
        if not count:
            out.zero_()
            return
        order = order[:count]
        both = grouped_linear(everyone.values[order // chosen.shape[1]], up, ends)
        parts = grouped_linear(gated(both, everyone.weights.flatten()[order]), down, ends)
        places = torch.full_like(local, -1, dtype=torch.int64)
        places[order] = torch.arange(count, device=order.device)
        spread.sum_placed(parts, places.view(chosen.shape), out)
