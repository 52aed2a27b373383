"""Random weights of the GLM-5.2 architecture, without torch: its import would cost seconds at every pod start.

The same bytes on every machine: weights are sums of bytes of PCG64's raw stream, which NumPy keeps for ever (NEP 19),
times one factor. No distribution of NumPy's, which may change, and no vectorised transcendental function, which may
differ in the last bit between processors, takes part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import numpy.typing
from safetensors.numpy import save

from glm52_engine.checkpoint.config import parse_model_spec
from glm52_engine.checkpoint.tensors import expected_tensors

Array = numpy.typing.NDArray[numpy.float32]

_SEED = 5_2
_BYTES = 256
"""Ids 0..255 are the bytes."""

_CONSTANT = 8.0
"""Value of the hidden channel 0, which no layer writes: through it the output layer has a bias per token."""

_OUTPUT_SCALE = 4.0
"""Standard deviation of a logit around its bias: near-ties of the best two are then far above float32 noise."""

_GAIN = 1.5
"""What a sub-layer adds, against what is there: below 1 the last token alone decides, and greedy output loops."""

_READS_HIDDEN = tuple(
    f"{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa", "wk", "gate", "gate_proj", "up_proj")
)
"""Layers do not read the constant channel: it would make all queries and keys alike."""

_SHARPNESS = 2.0
"""Of the attention: it follows single tokens, so that a wrong one among the selected changes the output."""


def random_weights(config: Mapping[str, Any]) -> bytes:
    """A safetensors file with every tensor that the parsed config.json implies, in float32; vocabulary of bytes."""
    spec = parse_model_spec(dict(config), Path("config.json"))
    stream = numpy.random.PCG64(_SEED)
    tensors = {
        name: numpy.ascontiguousarray(_shape_tensor(name, _bell(want.shape, stream)))
        for name, want in sorted(expected_tensors(spec).items())
    }
    return bytes(save(tensors, metadata={"format": "pt"}))


def _bell(shape: tuple[int, ...], stream: numpy.random.PCG64) -> Array:
    """Mean 0, variance 1, nearly normal: the sum of four uniform bytes, exact in float32."""
    size = math.prod(shape)
    raw = stream.random_raw(-(-size // 2)).astype("<u8").view(numpy.uint8)
    sums = raw.reshape(-1, 4).sum(axis=1, dtype=numpy.int32)[:size]
    bell: Array = (sums - 510).astype(numpy.float32).reshape(shape) * numpy.float32(1 / 148)
    return bell


def _shape_tensor(name: str, bell: Array) -> Array:
    """Scale of each kind of tensor, chosen so that context decides the next token and near-ties are rare."""
    if name.endswith("norm.weight"):
        return 1 + bell * numpy.float32(0.125)
    if name.endswith("norm.bias"):
        return bell * numpy.float32(0.125)
    if name.endswith("e_score_correction_bias"):
        return bell * numpy.float32(0.25)
    if name == "model.embed_tokens.weight":
        bell[:, 0] = _CONSTANT
        return bell
    if name == "lm_head.weight":
        return _lm_head(bell)
    scaled = bell * numpy.float32(bell.shape[-1] ** -0.5)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        scaled *= numpy.float32(_GAIN)
        scaled[0] = 0
    elif name.endswith(("q_b_proj.weight", "kv_b_proj.weight")):
        scaled *= numpy.float32(_SHARPNESS)
    elif name.endswith("weights_proj.weight"):
        # Positive weights: else whole contexts score exactly 0 and only the tie-break decides.
        scaled[:, 0] = 1.0
    elif name.endswith(_READS_HIDDEN):
        scaled[:, 0] = 0
    return scaled


def _lm_head(bell: Array) -> Array:
    """Prefers lower-case letters and blanks to other printable bytes, those to the rest, and special tokens to none."""
    bias = numpy.full(bell.shape[0], -50.0, dtype=numpy.float32)
    bias[:_BYTES] = -15.0
    bias[0x20:0x7F] = 0.0
    bias[ord("a") : ord("z") + 1] = 9.0
    bias[ord(" ")] = 10.0
    scaled = bell * numpy.float32(_OUTPUT_SCALE * bell.shape[-1] ** -0.5)
    scaled[:, 0] = bias
    return scaled
