"""What is mounted below a folder, and taking it away."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster.shell import ok


def mounted_below(folder: Path, mountinfo: str) -> list[str]:
    """Mount points at or below a folder, innermost first, out of the text of /proc/self/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        point = line.split(" ")[4].encode().decode("unicode_escape")  # a space is written \040
        if point == str(folder) or point.startswith(f"{folder}/"):
            found.append(point)
    return sorted(found, key=lambda point: (point.count("/"), point), reverse=True)


def unmount_below(folder: Path) -> list[str]:
    """Unmount everything at or below a folder and return what would not go."""
    file = Path("/proc/self/mountinfo")
    if not file.exists():
        return []
    for point in mounted_below(folder, file.read_text()):
        # Lazily, or a dying process that still holds a file there would keep it for a while.
        ok(["umount", "--lazy", point])
    return mounted_below(folder, file.read_text())
