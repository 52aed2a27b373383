"""Presets: the same bytes everywhere, written whole or not at all, without torch."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from glm52_engine.checkpoint import make_checkpoint
from glm52_engine.config import ConfigError

TINY_WEIGHTS = "aa485caefc6b85d2cebec6e3cd49d098426dcfd431ac18a54d04e1d73f6df059"

TORCH_FREE = """
import sys
from glm52_engine.cli import main
for preset in ("tiny", "demo"):
    assert main(["make-checkpoint", "--preset", preset, "--out", f"{sys.argv[1]}/{preset}"]) == 0
print(sorted(name for name in ("torch", "transformers", "tokenizers") if name in sys.modules))
"""


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_the_command_makes_the_same_bytes_without_torch(
    tiny_checkpoint: Path, demo_checkpoint: Path, tmp_path: Path
) -> None:
    out = subprocess.run(
        [sys.executable, "-c", TORCH_FREE, str(tmp_path / "again")], capture_output=True, text=True, check=True
    )
    # An init container makes one at every pod start, and torch's import takes seconds.
    assert out.stdout.strip() == "[]"
    assert digests(tmp_path / "again/tiny") == digests(tiny_checkpoint)
    assert digests(tmp_path / "again/demo") == digests(demo_checkpoint)
    assert sorted(entry.name for entry in (tmp_path / "again").iterdir()) == ["demo", "tiny"], (
        "no staging directory is left behind"
    )


def test_the_bytes_are_those_of_every_machine(tiny_checkpoint: Path) -> None:
    assert digests(tiny_checkpoint)["model.safetensors"] == TINY_WEIGHTS


def test_a_whole_one_is_left_alone(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "out")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    make_checkpoint("tiny", tmp_path / "out")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before


def test_half_of_one_is_completed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    # A maker that writes into a mount point can be killed between two files, a node before it wrote back its pages.
    make_checkpoint("tiny", tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").write_bytes(b"")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    part = tmp_path / ".model.safetensors.x.part"
    part.write_bytes(b"half")
    make_checkpoint("tiny", tmp_path)
    part.unlink()
    assert digests(tmp_path) == digests(tiny_checkpoint)


@pytest.mark.parametrize("file", ["notes.txt", "model.safetensors", "config.json"])
def test_anything_else_is_not_touched(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("mine")
    with pytest.raises(ConfigError, match=rf"found other contents in \['{file}'\]; expected an empty"):
        make_checkpoint("tiny", tmp_path)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [(file, "mine")]


def test_the_right_size_is_not_enough(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path)
    weights = tmp_path / "model.safetensors"
    other = weights.read_bytes()[:-4] + b"mine"
    weights.write_bytes(other)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        make_checkpoint("tiny", tmp_path)
    assert weights.read_bytes() == other


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"file.*(Not a directory|File exists).*expected a directory"):
            make_checkpoint("tiny", out)
    with pytest.raises(ConfigError, match="preset: found 'huge'"):
        make_checkpoint("huge", tmp_path / "out")
