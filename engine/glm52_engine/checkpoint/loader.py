"""A checkpoint's files → the tensors of a `ModelSpec` on their device, through one buffer of bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.checkpoint.fp8 import Fp8Weight, dequantize_into
from glm52_engine.checkpoint.quantization import FP8_BLOCK, Fp8
from glm52_engine.checkpoint.reader import TORCH_DTYPES, CheckpointFiles, Stored
from glm52_engine.checkpoint.tensors import TensorSpec, expert_of, is_scale, owned, scale_name
from glm52_engine.checkpoint.verify import verify
from glm52_engine.config import ConfigError

Progress = Callable[[int, int], None]
"""Bytes read so far and in all."""

_TILE_BYTES = 16 << 20
"""Most bytes that are on their way from a file to a device at once."""

_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors by their checkpoint name. On CPU, what is not converted lies on the files' own pages."""

    tensors: dict[str, torch.Tensor]
    fp8: dict[str, Fp8Weight]
    """FP8 weights that were kept as they are stored; they are not in `tensors`."""
    fingerprint: str
    """SHA-256 (hex) over config.json, the tensor headers and a sample of the bytes of every tensor that all ranks have.

    The same on every rank: experts that other ranks own are not read for it.
    """


def load_weights(
    checkpoint: Path,
    spec: ModelSpec,
    *,
    device: torch.device | str = "cpu",
    fp8: Fp8 = "dequantize",
    experts: range | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Weights:
    """Read every tensor of the model, of the routed experts only those in `experts` (None: all). Raises ConfigError.

    Beside the result, host memory holds one buffer of 16 MiB, and 128 rows of an FP8 weight in float32 while it is
    dequantised.
    """
    with CheckpointFiles(checkpoint) as files:
        expected = verify(checkpoint, spec, files.tensors)
        wanted = {name: files.tensors[name] for name in owned(expected, experts)}
        loader = _Loader(wanted, torch.device(device), getattr(torch, spec.dtype), fp8, on_progress)
        loader.run()
        fingerprint = _fingerprint(checkpoint, expected, files.tensors)
    return Weights(loader.tensors, loader.fp8, fingerprint)


def read_fingerprint(checkpoint: Path, spec: ModelSpec) -> str:
    """`Weights.fingerprint` without reading the weights: ranks of several hosts compare it while they still load.

    Raises ConfigError for a checkpoint that `load_weights` would refuse by its headers.
    """
    with CheckpointFiles(checkpoint) as files:
        return _fingerprint(checkpoint, verify(checkpoint, spec, files.tensors), files.tensors)


@dataclass(slots=True)
class _Loader:
    """Carries each tensor from its file to its device, in the order in which the files hold them."""

    wanted: Mapping[str, Stored]
    device: torch.device
    dtype: torch.dtype
    mode: Fp8
    on_progress: Progress
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fp8: dict[str, Fp8Weight] = field(default_factory=dict)
    _done: int = 0
    _total: int = 0
    _buffer: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def run(self) -> None:
        self._total = sum(stored.nbytes for stored in self.wanted.values())
        self._buffer = torch.empty(self._buffer_bytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        for name, stored in sorted(self.wanted.items(), key=lambda item: (item[1].path, item[1].offset)):
            if is_scale(name):
                continue  # read with its weight
            if stored.dtype != "F8_E4M3":
                self.tensors[name] = self._plain(stored)
                continue
            scale = self._scale(scale_name(name))
            if self.mode == "keep":
                self.fp8[name] = Fp8Weight(self._plain(stored), scale)
            else:
                self.tensors[name] = self._dequantized(stored, scale)

    def _buffer_bytes(self) -> int:
        """A row of FP8 blocks must fit, however wide it is."""
        widest = max((stored.shape[1] for stored in self.wanted.values() if stored.dtype == "F8_E4M3"), default=0)
        return max(min(_TILE_BYTES, self._total), FP8_BLOCK * widest)

    def _read(self, stored: Stored, first: int, count: int) -> torch.Tensor:
        """uint8 [count] in the buffer: valid until the next read."""
        part = self._buffer[:count]
        stored.file.read_into(stored.offset + first, part)
        self._done += count
        self.on_progress(self._done, self._total)
        return part

    def _plain(self, stored: Stored) -> torch.Tensor:
        dtype = TORCH_DTYPES[stored.dtype]
        on_pages = self.device.type == "cpu" and stored.offset % dtype.itemsize == 0
        out = stored.file.view(stored) if on_pages else torch.empty(stored.shape, dtype=dtype, device=self.device)
        flat = out.flatten().view(torch.uint8)
        for first in range(0, stored.nbytes, len(self._buffer)):
            # Pages are read here as well, and not by the first request that needs them.
            part = self._read(stored, first, min(len(self._buffer), stored.nbytes - first))
            if not on_pages:
                flat[first : first + len(part)].copy_(part)
        return out

    def _scale(self, name: str) -> torch.Tensor:
        stored = self.wanted[name]
        scale = self._plain(stored)
        wrong = ~(scale.isfinite() & (scale >= 0))
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            raise ConfigError(
                f"{stored.path}: {name}: found {scale[tuple(place)].item()} at {place}; "
                "expected finite scales that are not negative"
            )
        return scale

    def _dequantized(self, stored: Stored, scale: torch.Tensor) -> torch.Tensor:
        rows, columns = stored.shape
        out = torch.empty(stored.shape, dtype=self.dtype, device=self.device)
        blocks = len(self._buffer) // (columns * FP8_BLOCK)
        for block in range(0, len(scale), blocks):
            first, last = block * FP8_BLOCK, min(rows, (block + blocks) * FP8_BLOCK)
            part = self._read(stored, first * columns, (last - first) * columns).to(self.device)
            tile = part.view(torch.float8_e4m3fn).view(last - first, columns)
            dequantize_into(out[first:last], tile, scale[block : block + blocks])
        return out


def _fingerprint(checkpoint: Path, expected: Mapping[str, TensorSpec], stored: Mapping[str, Stored]) -> str:
    """Two fine-tunes of one model differ in their bytes only, so headers alone would let them be paired."""
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for name in sorted(expected):
        digest.update(f"{name} {expected[name].dtype} {expected[name].shape}".encode())
        if expert_of(name) is None:
            digest.update(stored[name].file.sample(stored[name], _SAMPLE_BYTES))
    return digest.hexdigest()
