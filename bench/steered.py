"""Weights and index keys whose top-k selections move as fast as one says, where those of a random model jump about.

Every index key is a point on a circle, at an angle of its own; every index query is a hand that turns by a fixed angle
a token. The selected tokens are those nearest to the hand: an arc with a share top-k ÷ context of the circle, so that
the hand's speed is the share of a selection that is new in the next step. Its tokens lie scattered over the context.

Nothing of the model is replaced for it. Channel 0 of the hidden state is the same for every token, because no layer
writes to it; queries and head weights read that channel alone; the pair of elements that turns with the position is the
first one, at the frequency that is asked for; keys of new tokens come from the key norm's bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bench import shapes
from glm52_engine.checkpoint.config import ModelSpec, parse_model_spec
from glm52_engine.checkpoint.loader import Weights
from glm52_engine.kv import Pool

CHANNEL = 8.0
"""Of every token's embedding, where others are about 1: rounding what the other channels add does not matter then."""

SPREAD = 0.2
"""Radians between the outermost heads' hands: in bfloat16 one hand points up to 0.004 beside its mark, many on average
do not."""


def spec(sizes: Mapping[str, Any] = MappingProxyType({})) -> ModelSpec:
    """The model of `shapes` with one full layer, whose selection the three others share; `sizes` of another one."""
    # The list says which layers are full; the two numbers are the real model's and say otherwise.
    config = {k: v for k, v in shapes.config().items() if k not in ("index_topk_freq", "index_skip_topk_offset")}
    types = ["full", "shared", "shared", "shared"]
    return parse_model_spec(config | {"indexer_types": types} | dict(sizes), Path("bench/steered.py"))


def steer(spec: ModelSpec, weights: Weights) -> None:
    """Change random tensors, in place, into those of a model that selects as described above."""
    tensors = weights.tensors
    tensors["model.embed_tokens.weight"][:, 0] = CHANNEL
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
        elif name.endswith("q_a_proj.weight"):
            tensor[0] = 0
            tensor[0, 0] = 1
        elif name.endswith("indexer.wq_b.weight"):
            heads = tensor.zero_().view(spec.index_n_heads, spec.index_head_dim, -1)
            angles = torch.linspace(-SPREAD / 2, SPREAD / 2, spec.index_n_heads)
            heads[:, 0, 0], heads[:, 1, 0] = angles.cos().to(tensor), angles.sin().to(tensor)
        elif name.endswith("indexer.weights_proj.weight"):
            tensor.zero_()
            tensor[:, 0] = 1
        elif name.endswith("indexer.k_norm.weight"):
            tensor.zero_()
        elif name.endswith("indexer.k_norm.bias"):
            tensor.zero_()
            tensor[0] = 1


def speed(spec: ModelSpec, context: int, overlap: float) -> float:
    """Radians a token by which the hand turns for a selection to keep the share `overlap` of the one before."""
    arc = 2 * math.pi * min(1.0, spec.index_topk / context)
    return (1 - overlap) * arc


def fill(pool: Pool, device: str, *, seed: int = 7) -> None:
    """Every row of a pool that is not FP8 random, and every index key somewhere on the circle.

    Whichever blocks a request gets, its context is there: nothing has to be computed for it.
    """
    draw = torch.Generator(device).manual_seed(seed)
    rows = pool.tensor.view(pool.layout.dtype)
    step = max(1, (256 << 20) // pool.block_bytes)
    for first in range(0, pool.num_blocks, step):
        part = rows[first : first + step]
        part.copy_(torch.randn(part.shape, generator=draw, device=device, dtype=part.dtype))
        for keys in pool.index.values():
            assert isinstance(keys, torch.Tensor)
            some = keys[first : first + step]
            angles = torch.rand(some.shape[:-1], generator=draw, device=device) * 2 * math.pi
            points = torch.zeros(some.shape, device=device, dtype=some.dtype)
            points[..., 0], points[..., 1] = angles.cos().to(points), angles.sin().to(points)
            some.copy_(points)
