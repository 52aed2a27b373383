"""Checkpoints on disk: the architecture they declare, their weights, and small ones made on the spot."""

from glm52_engine.checkpoint.config import ModelSpec, read_model_spec
from glm52_engine.checkpoint.loader import Weights, load_weights, weight_bytes
from glm52_engine.checkpoint.make import make_checkpoint

__all__ = ["ModelSpec", "Weights", "load_weights", "make_checkpoint", "read_model_spec", "weight_bytes"]
