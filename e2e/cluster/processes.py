"""Finding and ending the processes that are ours, also those whose pid file is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

CGROUP = "glm52"
CGROUPS = Path("/sys/fs/cgroup")


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def mentioning(folder: Path) -> list[int]:
    """Docker's processes (dockerd, containerd, its shims) whose command line names a file below the folder."""
    return [pid for pid in everyone() if pid != os.getpid() and belongs(command_line(pid), folder)]


def belongs(command: str, folder: Path) -> bool:
    """Whether a command line is one of Docker's about that folder; an editor with a file open there is not."""
    program = os.path.basename(command.split(" ")[0])
    docker = program.startswith(("dockerd", "containerd", "docker-proxy", "runc"))
    return docker and f"{folder}/" in command


def in_cgroup(name: str = CGROUP, root: Path = CGROUPS) -> set[int]:
    """Processes in our cgroup or below it, in any hierarchy: everything that ever ran in a node."""
    found: set[int] = set()
    for top in cgroup_folders(name, root):
        for procs in top.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found.update(int(line) for line in procs.read_text().split())
    return found - {0, os.getpid()}


def cgroup_folders(name: str = CGROUP, root: Path = CGROUPS) -> list[Path]:
    hierarchies = [root, *(each for each in root.glob("*") if each.is_dir() and not each.is_symlink())]
    return [each / name for each in hierarchies if (each / name).is_dir()]


def remove_cgroups(name: str = CGROUP, root: Path = CGROUPS) -> None:
    """Remove our empty cgroups, innermost first."""
    for top in cgroup_folders(name, root):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def end(pids: Iterable[int], patience: float, still_ours: Callable[[int], bool] = lambda _: True) -> None:
    """TERM, then KILL after `patience` seconds; returns when all are gone."""
    alive = {pid for pid in pids if still_ours(pid)}
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while alive and time.monotonic() < deadline:
            # A number may be given to another process at once: look again whose it is.
            alive = {pid for pid in alive if _running(pid) and still_ours(pid)}
            time.sleep(0.05)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def everyone() -> list[int]:
    """The numbers of all processes."""
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]
