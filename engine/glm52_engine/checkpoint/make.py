"""Writes a preset's files into a directory: whole or not at all, and never over somebody else's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from glm52_engine.checkpoint.presets import preset_files
from glm52_engine.config import ConfigError

_PART = ".part"


def make_checkpoint(preset: str, out: Path) -> None:
    """Write a checkpoint to the directory `out`, atomically; does nothing when `out` already holds this preset whole.

    Raises ConfigError for an unknown preset, when `out` holds something else, or when it cannot be written.
    """
    files = preset_files(preset)
    try:
        if _missing(out, files):
            _write(out, files)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or out}: cannot be used ({error.strerror}); expected a directory that can be written"
        ) from error


def _missing(out: Path, files: Mapping[str, bytes]) -> list[str]:
    """Names of the files that are yet to be written. Contents are compared: a name alone says nothing of what is in it.

    Raises ConfigError for what no maker of this preset leaves behind, also when it was killed or the node died.
    """
    if not os.path.lexists(out):
        return sorted(files)
    entries = {entry.name: entry for entry in out.iterdir()}
    foreign = [name for name in entries if name not in files and not (name[0] == "." and name.endswith(_PART))]
    missing = []
    for name, content in files.items():
        found = entries[name].read_bytes() if name in entries else b""
        if found == content:
            continue
        missing.append(name)
        # The beginning of a file is what stays of one whose pages were not written back yet.
        if not content.startswith(found):
            foreign.append(name)
    if foreign:
        raise ConfigError(f"{out}: found other contents in {sorted(foreign)}; expected an empty or absent directory")
    return sorted(missing)


def _write(out: Path, files: Mapping[str, bytes]) -> None:
    """As one directory where there is none; else file by file, since `out` may be a mount point."""
    if not out.is_dir():
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            for name, content in files.items():
                _write_file(staging / name, content)
            staging.chmod(0o755)
            os.rename(staging, out)
            return
        except OSError:
            # Two makers may race, and another one's directory be there by now.
            if not out.is_dir():
                raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    for name in _missing(out, files):
        _replace_file(out / name, files[name])


def _replace_file(path: Path, content: bytes) -> None:
    # A name of its own for each maker: with a common one, two that race would rename each other's half.
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_PART, dir=path.parent)
    os.close(handle)
    try:
        _write_file(Path(part), content)
        os.rename(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    path.chmod(0o644)
