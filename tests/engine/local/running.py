"""`glm52-engine local` as a child process: its lines, its children, and what its pods say of themselves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from glm52_engine.config import INTERNAL_TOKEN_HEADER

ROOT = Path(__file__).parents[3]
START_SECONDS = 150
MODEL = "glm-5.2"


class Running:
    def __init__(self, *args: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "glm52_engine.cli", "local", "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "engine")},
        )
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()

    def says(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        limit = time.monotonic() + seconds
        with self._news:
            while True:
                for line in self.lines:
                    if match := re.search(pattern, line):
                        return match
                left = limit - time.monotonic()
                assert left > 0, f"never said {pattern!r}:\n" + "\n".join(self.lines)
                self._news.wait(left)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    @property
    def url(self) -> str:
        return self.says(r"ready: (http://\S+)/v1").group(1)

    @property
    def folder(self) -> Path:
        return Path(self.says(r"logs: (\S+)").group(1))

    def children(self) -> dict[str, int]:
        """Name → pid of the processes it has started."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    name = next(v[9:].decode() for v in environment if v.startswith(b"POD_NAME="))
                    found[name] = int(entry.name)
        return found


def state(url: str, running: Running) -> dict[str, Any]:
    token = (running.folder / "token").read_text()
    request = urllib.request.Request(url + "/internal/v1/state", headers={INTERNAL_TOKEN_HEADER: token})
    with urllib.request.urlopen(request, timeout=5) as response:
        found: dict[str, Any] = json.load(response)
        return found


def pods(running: Running) -> dict[str, list[dict[str, Any]]]:
    router = state(running.url, running)
    return {role: [state(pod["url"], running) for pod in router[role]] for role in ("prefill", "decode")}
