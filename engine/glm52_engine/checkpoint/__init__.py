"""Checkpoints on disk: the architecture they declare, their weights, and small ones made on the spot."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm52_engine.checkpoint.config import ModelSpec, read_model_spec
    from glm52_engine.checkpoint.fp8 import Fp8Weight
    from glm52_engine.checkpoint.loader import Weights, load_weights, read_fingerprint
    from glm52_engine.checkpoint.make import make_checkpoint
    from glm52_engine.checkpoint.tensors import weight_bytes

__all__ = [
    "Fp8Weight",
    "ModelSpec",
    "Weights",
    "load_weights",
    "make_checkpoint",
    "read_fingerprint",
    "read_model_spec",
    "weight_bytes",
]

_HOMES = {
    "ModelSpec": "config",
    "read_model_spec": "config",
    "Fp8Weight": "fp8",
    "Weights": "loader",
    "load_weights": "loader",
    "read_fingerprint": "loader",
    "weight_bytes": "tensors",
    "make_checkpoint": "make",
}


def __getattr__(name: str) -> Any:
    # The loader needs torch, whose import costs seconds: a maker in an init container must not pay for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
