"""Where things lie: a cache by content that may be deleted at any time, and the state of the one cluster."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import Refused
from e2e.cluster.mounts import unmount_below

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# A Unix socket's path may have 107 bytes; dockerd makes its longest ones this far below the state folder.
LONGEST_SOCKET = len("/docker/exec/containerd/containerd-debug.sock.ttrpc")
SOCKET_PATH_LIMIT = 107


@dataclass(frozen=True)
class Paths:
    """Every place that this package writes to."""

    cache: Path

    @property
    def state(self) -> Path:
        return self.cache / "state"

    @property
    def docker(self) -> Path:
        return self.state / "docker"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def record(self) -> Path:
        return self.state / "cluster.json"

    @property
    def network(self) -> Path:
        return self.state / "network.json"

    @property
    def store(self) -> Path:
        """Unpacked layers and image descriptions; the nodes mount it."""
        return self.cache / "store"

    @property
    def tmp(self) -> Path:
        return self.cache / "tmp"


def find(env: Mapping[str, str]) -> Paths:
    """The cache folder that the environment names."""
    base = Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME") or "~").expanduser() / ".cache")
    cache = Path(env.get("GLM52_CACHE") or base / "glm52").absolute()
    if len(str(cache / "state")) + LONGEST_SOCKET > SOCKET_PATH_LIMIT:
        raise Refused(f"{cache} is too long a path for Docker's sockets: set GLM52_CACHE to a shorter one.")
    return Paths(cache)


def digest(parts: Iterable[str | bytes | Path]) -> str:
    """Twelve hex digits that change with any of the parts; a Path counts with its name and content."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            for file in source_files(part):
                total.update(f"\0{file.relative_to(part.parent)}\0".encode())
                total.update(file.read_bytes())
        else:
            total.update(b"\0" + (part.encode() if isinstance(part, str) else part))
    return total.hexdigest()[:12]


def source_files(path: Path) -> list[Path]:
    """The files below a path (or the file itself), less what Python and editors leave about."""
    if path.is_file():
        return [path]
    found = []
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name != "__pycache__" and not name.startswith("."))
        found += [Path(folder) / file for file in sorted(files) if not file.endswith((".pyc", "~"))]
    return found


@contextlib.contextmanager
def fresh(target: Path, paths: Paths) -> Iterator[Path]:
    """A folder to build in, renamed to `target` when all went well: a killed build is never taken for a whole one."""
    part = paths.tmp / f"{target.name}.{os.getpid()}.part"
    discard(part)
    part.mkdir(parents=True)
    try:
        yield part
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(part, target)
    finally:
        discard(part)


def discard(folder: Path) -> None:
    """Delete a folder, but nothing that is mounted in it: a killed debootstrap leaves /proc there."""
    if not folder.exists():
        return
    unmount_below(folder)
    shutil.rmtree(folder)


def sweep(paths: Paths) -> None:
    """Delete what killed builds left half done."""
    if paths.tmp.is_dir():
        for leftover in paths.tmp.glob("*.part"):
            discard(leftover)


def write_atomically(file: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file in one step: a reader, or a run after a kill, sees the old text or the new, never half."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_text(text)
    part.chmod(mode)
    part.replace(file)
