"""Safetensors files of a checkpoint: where each tensor's bytes lie, and the only code that reads them."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from glm52_engine.checkpoint.fields import read_json_object
from glm52_engine.config import ConfigError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
"""Of safetensors' notation; the only ones that a checkpoint of this architecture has."""

_NAMED_AT_MOST = 5


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as it lies on disk; `offset` in bytes from the start of the file."""

    file: TensorFile
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int

    @property
    def path(self) -> Path:
        return self.file.path


class TensorFile:
    """One safetensors file, open until `close`. What `view` returned stays valid afterwards."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for whatever is no whole safetensors file."""
        self.path = path
        header, start = _checked_header(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None
        self.tensors = {
            name: Stored(
                self,
                tuple(entry["shape"]),
                str(entry["dtype"]),
                start + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def close(self) -> None:
        os.close(self._fd)

    def read_into(self, offset: int, buffer: torch.Tensor) -> None:
        """Fill a contiguous uint8 tensor in host memory; other threads run meanwhile. Raises ConfigError."""
        view = buffer.numpy().data
        while view:
            try:
                count = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise ConfigError(f"{self.path}: cannot be read at byte {offset} ({error.strerror})") from error
            if count == 0:
                raise ConfigError(f"{self.path}: ends at byte {offset}: it was whole before and has changed since")
            view, offset = view[count:], offset + count

    def view(self, stored: Stored) -> torch.Tensor:
        """The tensor on the file's own pages, without a copy; `stored.offset` must be a multiple of its element."""
        if self._map is None:
            # Private and writable, since torch has no read-only tensors: a write would stay in this process.
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        dtype = TORCH_DTYPES[stored.dtype]
        flat = torch.frombuffer(self._map, dtype=dtype, count=stored.nbytes // dtype.itemsize, offset=stored.offset)
        return flat.view(stored.shape)

    def _bytes(self, offset: int, count: int) -> bytes:
        buffer = torch.empty(count, dtype=torch.uint8)
        self.read_into(offset, buffer)
        return bytes(buffer.tolist())

    def sample(self, stored: Stored, count: int) -> bytes:
        """The first and the last `count` bytes of a tensor, or fewer where it has fewer."""
        count = min(count, stored.nbytes)
        return self._bytes(stored.offset, count) + self._bytes(stored.offset + stored.nbytes - count, count)


def _checked_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where it ends. The library refuses what is truncated, overlaps, leaves gaps or lies about sizes.

    It keeps to itself where the bytes lie, which is why the header is read once more.
    """
    try:
        if not path.is_file():
            raise OSError("no regular file")
        with safe_open(path, framework="pt"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(size)), 8 + size
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        size_found = f"{path.stat().st_size} bytes" if path.is_file() else "no regular file"
        raise ConfigError(
            f"{path}: found {size_found}, unreadable ({error}); expected a whole safetensors file"
        ) from error


class CheckpointFiles:
    """All weight files of a checkpoint directory, open; a context manager."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises ConfigError, also for a tensor that two files have and for an index that contradicts them."""
        self._stack = ExitStack()
        self.tensors: dict[str, Stored] = {}
        with self._stack:
            for path in weight_files(checkpoint):
                file = TensorFile(path)
                self._stack.callback(file.close)
                for name, stored in file.tensors.items():
                    if name in self.tensors:
                        raise ConfigError(f"{path}: {name}: found also in {self.tensors[name].path}; expected it once")
                    self.tensors[name] = stored
            if (checkpoint / INDEX_FILE).exists():
                _check_index(checkpoint, self.tensors)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def weight_files(checkpoint: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in name order; raises ConfigError."""
    if (checkpoint / INDEX_FILE).exists():
        return sorted({checkpoint / file for file in _weight_map(checkpoint).values()})
    single = checkpoint / SINGLE_FILE
    if not single.is_file():
        raise ConfigError(f"{checkpoint}: found neither {INDEX_FILE} nor {SINGLE_FILE}; expected one of them")
    return [single]


def _weight_map(checkpoint: Path) -> dict[str, str]:
    path = checkpoint / INDEX_FILE
    weight_map = read_json_object(path, "a safetensors index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: weight_map: found {type(weight_map).__name__}; expected tensor name → file name")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{path}: weight_map: {name}: found {file!r}; expected the name of a file beside it")
    return weight_map


def _check_index(checkpoint: Path, tensors: dict[str, Stored]) -> None:
    weight_map = _weight_map(checkpoint)
    wrong = [
        f"{name} in {tensors[name].path.name if name in tensors else 'no file'}, not {file}"
        for name, file in weight_map.items()
        if name not in tensors or tensors[name].path.name != file
    ]
    wrong += [f"{name} in {tensors[name].path.name}, not listed" for name in tensors.keys() - weight_map.keys()]
    if wrong:
        raise ConfigError(f"{checkpoint / INDEX_FILE}: contradicts the files: {few(wrong)}")


def few(items: Iterable[str]) -> str:
    """The first of them in order, and how many more there are."""
    listed = sorted(items)
    more = len(listed) - _NAMED_AT_MOST
    return ", ".join(listed[:_NAMED_AT_MOST]) + (f" and {more} more ({len(listed)} in all)" if more > 0 else "")
