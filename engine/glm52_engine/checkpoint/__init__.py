"""Checkpoints on disk: the architecture they declare, their weights, and small ones made on the spot."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm52_engine.checkpoint.config import ModelSpec, read_model_spec
    from glm52_engine.checkpoint.loader import Weights, load_weights, weight_bytes
    from glm52_engine.checkpoint.make import make_checkpoint

__all__ = ["ModelSpec", "Weights", "load_weights", "make_checkpoint", "read_model_spec", "weight_bytes"]

_HOMES = {
    "ModelSpec": "config",
    "read_model_spec": "config",
    "Weights": "loader",
    "load_weights": "loader",
    "weight_bytes": "loader",
    "make_checkpoint": "make",
}


def __getattr__(name: str) -> Any:
    # The loader needs torch, whose import costs seconds: a maker in an init container must not pay for it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
