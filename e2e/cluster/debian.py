"""Root file systems from Debian packages."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.paths import Paths
from e2e.cluster.progress import Phase
from e2e.cluster.shell import follow, ok, run

# bookworm on purpose: its systemd 252 still runs on cgroup v1, and its Python is 3.11, like the images'.
SUITE = "bookworm"
# The libraries are what Mooncake's programs are linked with.
BASE_PACKAGES = ("ca-certificates", "libcurl4", "libibverbs1", "libnuma1", "python3")
NODE_PACKAGES = (
    "ca-certificates", "conntrack", "dbus", "ethtool", "hostname", "iproute2", "iptables", "kmod", "mount", "nftables",
    "procps", "runc", "socat", "systemd", "systemd-sysv",
)  # fmt: skip
NOT_NEEDED = (
    "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var/cache/apt", "var/lib/apt/lists",
    "var/log", "dev",
)  # fmt: skip
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = "#!/bin/sh\n# glm52: no service starts while its package is being installed\nexit 101\n"


def install(packages: list[str], phase: Phase) -> None:
    """Install packages on this machine without starting any service of theirs."""
    phase.note(f"apt-get install {' '.join(packages)}")
    quiet: dict[str, str | None] = {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "--no-install-recommends", "--no-upgrade", *packages]
    with no_autostart():
        # The lists may be there already, and fetching them takes longer than all the rest.
        if not ok(command, env=quiet, timeout=600):
            run(["apt-get", "update"], env=quiet)
            run(command, env=quiet)


@contextlib.contextmanager
def no_autostart(policy: Path = POLICY) -> Iterator[None]:
    """Forbid service starts, as Debian's own means allow; a rule of the machine's owner stands."""
    ours = not policy.exists() or policy.read_text() == POLICY_TEXT  # the latter: left by a run that was killed
    if ours:
        policy.write_text(POLICY_TEXT)
        policy.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            policy.unlink(missing_ok=True)


def bootstrap(root: Path, packages: tuple[str, ...], paths: Paths, phase: Phase) -> None:
    """Fill a folder with a minimal Debian that has these packages."""
    downloads = paths.cache / "debs"
    downloads.mkdir(parents=True, exist_ok=True)
    command = [
        "debootstrap",
        "--variant=minbase",
        f"--cache-dir={downloads}",
        f"--include={','.join(packages)}",
        SUITE,
        root,
    ]
    # In a mount namespace of its own: when it is killed, the /proc that it mounts in the folder goes with it.
    follow(["unshare", "--mount", "--propagation=private", *map(str, command)],
           lambda line: phase.note(line.removeprefix("I: ")),
           # dpkg syncs every file, which doubles the time; a root that is cut short is thrown away anyway.
           env={"DPKG_FORCE": "unsafe-io"})  # fmt: skip
    slim(root)


def slim(root: Path) -> None:
    """Take out what a container never reads, and what is different on every run."""
    for name in NOT_NEEDED:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True)
    for name in (
        "etc/machine-id",
        "var/lib/dbus/machine-id",
        "etc/resolv.conf",
        "etc/hostname",
        "var/cache/ldconfig/aux-cache",
    ):
        (root / name).unlink(missing_ok=True)
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(folder) / name
            mode = path.lstat().st_mode
            # An image layer holds no devices; sockets and pipes are leftovers.
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                path.unlink()
