"""The store's master: Mooncake's own program, which keeps the names and places of all blocks, and none of them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NoReturn

from glm52_engine.config import ConfigError

CLIENT_SECONDS = 10
"""Without a sign of life of a pod, after which its part of the store is forgotten."""


def master_command(host: str, port: int, health_port: int) -> list[str]:
    """The program and its arguments; it answers GET /health on `health_port`. Raises ConfigError where it is not."""
    found = importlib.util.find_spec("mooncake")
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    programs = [program for folder in folders if (program := Path(folder) / "mooncake_master").is_file()]
    if not programs:
        raise ConfigError(
            "mooncake_master: not found; the store of prefixes needs the package mooncake-transfer-engine-non-cuda"
        )
    return [
        str(programs[0]),
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={health_port}",
        f"--client_ttl={CLIENT_SECONDS}",
        # Of a pod that was killed while it saved; till then others cannot save what it was about to.
        f"--put_start_discard_timeout_sec={CLIENT_SECONDS}",
        # Two kilobytes of log every few seconds, which its metrics say as well.
        "--enable_metric_reporting=false",
    ]


def become_master(host: str, port: int, health_port: int) -> NoReturn:
    """Replaces this process, so that it gets the signals of its container. Raises ConfigError."""
    command = master_command(host, port, health_port)
    os.execv(command[0], command)
