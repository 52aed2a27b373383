"""Which network devices KV crosses by. The choice is pure; what the pod has is read from /sys."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from glm52_engine.config import ConfigError

log = logging.getLogger(__name__)

AUTO = "auto"

UCX_RAILS = 2
"""RDMA devices that UCX gives one transfer by itself."""


@dataclass(frozen=True, slots=True)
class Found:
    """Active devices of a pod: RDMA ones with their port (mlx5_0:1), and network interfaces (eth0)."""

    rdma: tuple[str, ...]
    network: tuple[str, ...]

    def __str__(self) -> str:
        return f"RDMA devices: {', '.join(self.rdma) or 'none'}; interfaces: {', '.join(self.network) or 'none'}"


@dataclass(frozen=True, slots=True)
class Choice:
    """`names`: what the transport is held to; empty for everything that it finds. `rails`: RDMA devices among them, all
    of which carry one transfer."""

    names: tuple[str, ...] = ()
    rails: int = 0


def choose(asked: str, found: Found) -> Choice:
    """`asked`: `config.KvTransferConfig.net_devices`. Raises ConfigError for a device that is not there: the transport
    itself takes any name, and goes another way without a word."""
    if asked == AUTO:
        return Choice((), len(found.rdma))
    names = tuple(asked.split(","))
    lacking = [name for name in names if name not in (*found.rdma, *found.network)]
    if lacking:
        raise ConfigError(
            f"kvTransfer.netDevices: {', '.join(lacking)} is not there or not active ({found}); correct the list, or "
            "leave it out to use every device"
        )
    return Choice(names, sum(name in found.rdma for name in names))


def chosen_devices(asked: str) -> Choice:
    """Of this pod, and told in the log. Raises ConfigError."""
    found = find()
    choice = choose(asked, found)
    names = ", ".join(choice.names or (*found.rdma, *found.network))
    log.info("devices for KV", extra={"asked": asked, "devices": names, "rails": choice.rails})
    return choice


def find(root: Path = Path("/sys/class")) -> Found:
    """What can carry traffic now. Unreadable entries are none."""
    ports = sorted(root.glob("infiniband/*/ports/*"))
    rdma = tuple(f"{port.parts[-3]}:{port.name}" for port in ports if "ACTIVE" in _text(port / "state"))
    # The loopback says "unknown", as do devices without a carrier to tell of.
    up = [each for each in sorted(root.glob("net/*")) if _text(each / "operstate") in ("up", "unknown")]
    return Found(rdma, tuple(each.name for each in up))


def apply(choice: Choice) -> dict[str, str]:
    """Parameters of NIXL's UCX backend, which is made after this: the number of rails is no parameter of it."""
    if choice.rails > UCX_RAILS:
        os.environ.setdefault("UCX_MAX_RNDV_RAILS", str(choice.rails))
    return {"ucx_devices": ",".join(choice.names)} if choice.names else {}


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
