"""Packages of a tool beside our own: only those that the environment lacks, or has in another version."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement


def overlay(lock: Path, target: Path) -> Path:
    """A folder for PYTHONPATH, made when it is not there for this lock. Raises CalledProcessError without an index."""
    done = target / ".lock"
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if done.exists() and done.read_text() == digest:
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    missing = target / "missing.txt"
    missing.write_text("".join(entry for entry in _entries(lock) if _differs(entry)))
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*install, "--no-deps", "--require-hashes", "--target", target, "-r", missing], check=True)
    done.write_text(digest)
    return target


def _entries(lock: Path) -> Iterator[str]:
    """Each package with its hashes, as it stands in the file."""
    entry: list[str] = []
    for line in lock.read_text().splitlines(keepends=True):
        if line.strip().startswith("#"):
            continue
        if not line.startswith(" ") and entry:
            yield "".join(entry)
            entry = []
        entry.append(line)
    yield "".join(entry)


def _differs(entry: str) -> bool:
    wanted = Requirement(entry.splitlines()[0].rstrip(" \\"))
    if wanted.marker is not None and not wanted.marker.evaluate():
        return False
    try:
        return importlib.metadata.version(wanted.name) not in wanted.specifier
    except importlib.metadata.PackageNotFoundError:
        return True
