"""Weights that were trained, in the folder `demo/`: the files with the recipe that made them and their SHA-256."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy
from safetensors import deserialize
from safetensors.numpy import save

from glm52_engine.checkpoint.assets import MERGES, RECIPE, WEIGHTS
from glm52_engine.config import ConfigError

DEMO = Path(__file__).parent / "demo"


def trained_weights(folder: Path) -> bytes:
    """The weights as a safetensors file in float32, in which every CPU computes; they are kept in bfloat16.

    Raises ConfigError when they are not those of the recipe.
    """
    stored = deserialize(_read_checked(folder, WEIGHTS))  # type: ignore[no-untyped-call] # in Rust, without stubs
    tensors = {name: _widen(tensor) for name, tensor in stored}
    return bytes(save(tensors, metadata={"format": "pt"}))


def trained_merges(folder: Path) -> list[tuple[str, str]]:
    """The vocabulary's merges, first to apply first. Raises ConfigError when they are not those of the recipe."""
    lines = _read_checked(folder, MERGES).decode().splitlines()
    return [(left, right) for left, _, right in (line.partition(" ") for line in lines)]


def _read_checked(folder: Path, name: str) -> bytes:
    """Other weights, or another vocabulary, would give text that is fluent and wrong."""
    path = folder / name
    try:
        wanted = json.loads((folder / RECIPE).read_text())["sha256"][name]
        content = path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be checked ({error!r}); install glm52-engine again") from error
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise ConfigError(f"{path}: found SHA-256 {found}; expected {wanted} ({RECIPE}); install glm52-engine again")
    return content


def _widen(tensor: dict[str, Any]) -> numpy.typing.NDArray[numpy.float32]:
    """float32 from a tensor of safetensors; bfloat16 is its upper half, and NumPy has no such type."""
    kind = {"BF16": "<u2", "F32": "<f4"}[tensor["dtype"]]
    raw = numpy.frombuffer(tensor["data"], kind).reshape(tensor["shape"])
    if tensor["dtype"] == "BF16":
        return (raw.astype("<u4") << 16).view("<f4")
    return raw
