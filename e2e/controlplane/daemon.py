"""One program that runs beside the tests and never outlives them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    # A test run that is killed leaves no control plane behind.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Daemon:
    """A process whose output goes to a file; started, ended and started again."""

    def __init__(self, argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.argv = [str(word) for word in argv]
        self.log = log
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self._process is None or self._process.poll() is not None, f"{self.argv[0]} runs already"
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self.argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.argv[0]} was never started"
        return self._process.pid

    def code(self) -> int | None:
        """The exit code; None while it runs. Negative: the signal that ended it."""
        return self._process.poll() if self._process is not None else None

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """The exit code; subprocess.TimeoutExpired where it goes on."""
        assert self._process is not None, f"{self.argv[0]} was never started"
        return self._process.wait(seconds)

    def end(self, seconds: float = 10.0) -> int | None:
        """TERM, and KILL after some seconds."""
        if self._process is None:
            return None
        self.signal(signal.SIGTERM)
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int | None:
        if self._process is None:
            return None
        self.signal(signal.SIGKILL)
        return self._process.wait(10)

    def text(self) -> str:
        """Everything that it wrote, over all its starts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""
