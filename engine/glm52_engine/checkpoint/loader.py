"""Memory-mapped safetensors → the exact tensors of a `ModelSpec`; whatever differs is named and refused."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.checkpoint.tensors import TensorSpec, expected_tensors
from glm52_engine.config import ConfigError

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_NAMED_AT_MOST = 5
_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by their checkpoint name, backed by the files' pages until something copies them."""

    tensors: dict[str, torch.Tensor]
    fingerprint: str
    """SHA-256 (hex) over config.json, the tensor headers and a sample of every tensor's bytes."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]
    dtype: str


def weight_files(checkpoint: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in name order; raises ConfigError."""
    if (checkpoint / INDEX_FILE).exists():
        return sorted({checkpoint / file for file in _weight_map(checkpoint).values()})
    single = checkpoint / SINGLE_FILE
    if not single.is_file():
        raise ConfigError(f"{checkpoint}: found neither {INDEX_FILE} nor {SINGLE_FILE}; expected one of them")
    return [single]


def weight_bytes(checkpoint: Path) -> int:
    """Bytes of all weight files; raises ConfigError."""
    try:
        return sum(file.stat().st_size for file in weight_files(checkpoint))
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: cannot be read ({error.strerror}); expected a safetensors file"
        ) from error


def load_weights(checkpoint: Path, spec: ModelSpec) -> Weights:
    """Map every tensor of the model; the MTP layers behind the last one are recognised and left out."""
    files = weight_files(checkpoint)
    entries = _read_headers(files)
    if (checkpoint / INDEX_FILE).exists():
        _check_index(checkpoint, entries)
    skipped = {name for name in entries if _is_mtp(name, spec)}
    if skipped:
        log.info("%s: left out %d tensors of the multi-token-prediction layer", checkpoint, len(skipped))
    expected = expected_tensors(spec)
    _check_names(checkpoint, expected, entries.keys() - skipped)
    _check_tensors(expected, entries)
    tensors = _map_tensors(files, expected)
    return Weights(tensors=tensors, fingerprint=_fingerprint(checkpoint, tensors))


def _weight_map(checkpoint: Path) -> dict[str, str]:
    path = checkpoint / INDEX_FILE
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a safetensors index") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is not a safetensors index ({error!r}); expected a 'weight_map'") from error
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConfigError(f"{path}: weight_map: found {type(weight_map).__name__}; expected tensor name → file name")
    return weight_map


def _open(file: Path) -> Any:
    """A safe_open handle; every way in which a file can be unusable becomes a ConfigError that names it."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        size = f"{file.stat().st_size} bytes" if file.is_file() else "no regular file"
        raise ConfigError(f"{file}: found {size}, unreadable ({error}); expected a whole safetensors file") from error


def _read_headers(files: Iterable[Path]) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for file in files:
        with _open(file) as handle:
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in entries:
                    raise ConfigError(f"{file}: {name}: found also in {entries[name].file}; expected it once")
                part = handle.get_slice(name)
                entries[name] = _Entry(file, tuple(part.get_shape()), part.get_dtype())
    return entries


def _check_index(checkpoint: Path, entries: dict[str, _Entry]) -> None:
    weight_map = _weight_map(checkpoint)
    wrong = [
        f"{name} in {entries[name].file.name if name in entries else 'no file'}, not {file}"
        for name, file in weight_map.items()
        if name not in entries or entries[name].file.name != file
    ]
    wrong += [f"{name} in {entries[name].file.name}, not listed" for name in entries.keys() - weight_map.keys()]
    if wrong:
        raise ConfigError(f"{checkpoint / INDEX_FILE}: contradicts the files: {_few(wrong)}")


def _is_mtp(name: str, spec: ModelSpec) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    first = spec.num_hidden_layers
    return match is not None and first <= int(match[1]) < first + spec.num_nextn_predict_layers


def _check_names(checkpoint: Path, expected: dict[str, TensorSpec], found: set[str]) -> None:
    problems = []
    if missing := expected.keys() - found:
        problems.append(f"missing {_few(missing)}")
    if extra := found - expected.keys():
        problems.append(f"unknown {_few(extra)}")
    if problems:
        raise ConfigError(
            f"{checkpoint}: found {len(found)} tensors, expected the {len(expected)} that config.json implies: "
            + "; ".join(problems)
        )


def _check_tensors(expected: dict[str, TensorSpec], entries: dict[str, _Entry]) -> None:
    wrong = [
        f"{entries[name].file}: {name}: found {entries[name].dtype} {list(entries[name].shape)}, "
        f"expected {want.dtype} {list(want.shape)}"
        for name, want in expected.items()
        if (entries[name].shape, entries[name].dtype) != (want.shape, want.dtype)
    ]
    if wrong:
        raise ConfigError(_few(wrong))


def _map_tensors(files: Iterable[Path], wanted: Iterable[str]) -> dict[str, torch.Tensor]:
    names = set(wanted)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with _open(file) as handle:
            for name in names & set(handle.keys()):
                tensors[name] = handle.get_tensor(name)
    return tensors


def _fingerprint(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> str:
    """Two fine-tunes of one model differ in their bytes only, so headers alone would let them be paired."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for name in sorted(tensors):
        tensor = tensors[name]
        raw = tensor.flatten().view(torch.uint8)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes(raw[:_SAMPLE_BYTES].tolist()))
        digest.update(bytes(raw[-_SAMPLE_BYTES:].tolist()))
    return digest.hexdigest()


def _few(items: Iterable[str]) -> str:
    listed = sorted(items)
    more = len(listed) - _NAMED_AT_MOST
    return ", ".join(listed[:_NAMED_AT_MOST]) + (f" and {more} more ({len(listed)} in all)" if more > 0 else "")
