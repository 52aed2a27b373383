"""Where the limits of this process's cgroup are written, of version 1 and 2."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def limit_files(
    controller: str, name: str, name_v1: str, *, root: Path = ROOT, membership: Path = MEMBERSHIP
) -> list[Path]:
    """The file of that limit of this process's cgroup and of every ancestor; in a container many of them are not
    there."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    paths = {"": "/", controller: "/"}
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" or controller in controllers.split(","):
            paths[controller if controllers else ""] = path
    return _files(root, paths[""], name) + _files(root / controller, paths[controller], name_v1)


def _files(mount: Path, path: str, name: str) -> list[Path]:
    here = mount / path.lstrip("/")
    return [folder / name for folder in (here, *here.parents) if folder == mount or mount in folder.parents]
