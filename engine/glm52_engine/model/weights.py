"""Parts of a checkpoint's tensors by the prefix of their names."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def under(weights: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, named without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
