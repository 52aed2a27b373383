"""The tiny preset: the same bytes everywhere, written whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from glm52_engine.checkpoint import make_checkpoint
from glm52_engine.config import ConfigError


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_same_bytes_every_time(tiny_checkpoint: Path, tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "again")
    assert digests(tmp_path / "again") == digests(tiny_checkpoint)
    assert [entry.name for entry in tmp_path.iterdir()] == ["again"], "no staging directory is left behind"


def test_a_whole_one_is_left_alone(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "out")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    make_checkpoint("tiny", tmp_path / "out")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before


def test_half_of_one_is_completed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    # A maker that writes into a mount point can be killed between two files.
    make_checkpoint("tiny", tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / ".model.safetensors.part").write_bytes(b"half")
    make_checkpoint("tiny", tmp_path)
    assert digests(tmp_path) == digests(tiny_checkpoint)


def test_anything_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"found \['notes.txt'\]"):
        make_checkpoint("tiny", tmp_path)
    with pytest.raises(ConfigError, match="preset: found 'huge'"):
        make_checkpoint("huge", tmp_path / "out")
