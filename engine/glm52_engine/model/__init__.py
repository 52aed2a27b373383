"""GLM-5.2 in plain PyTorch."""

from glm52_engine.model.model import Model
from glm52_engine.model.step import Span, Step, build_step

__all__ = ["Model", "Span", "Step", "build_step"]
