"""A whole deployment on the CPU engine, as a user starts it; all client tests share it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
START_SECONDS = 150


@pytest.fixture(scope="session")
def server(tiny_checkpoint: Path) -> Iterator[str]:
    """URL of the router, without /v1."""
    command = [sys.executable, "-m", "glm52_engine.cli", "local", "--port", "0", "--model", str(tiny_checkpoint)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    )
    assert process.stdout is not None
    try:
        ready = (line for line in process.stdout if "ready: " in line)
        yield next(ready).split("ready: ")[1].split("/v1")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0, "nothing of what the clients sent may end the deployment or keep it from draining"
