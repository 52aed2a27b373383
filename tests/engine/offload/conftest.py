from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm52_engine.local import die_with_parent
from glm52_engine.offload import store
from glm52_engine.offload.master import master_command
from glm52_engine.runtime import sharing
from tests.engine.runtime.support import Maker, eventually

DEADLINE = 60.0


async def in_time(condition: Callable[[], bool]) -> None:
    """Processes are started and Mooncake's own time-outs pass meanwhile, on a machine with more to do."""
    await eventually(condition, within=2 * DEADLINE)


class Master:
    """A real master on loopback, on the same port in each of its lives."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._ports = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def health_port(self) -> int:
        """Of its metrics, too."""
        return self._ports[1]

    def start(self) -> None:
        command = master_command("127.0.0.1", *self._ports)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent()
            )
        deadline = time.monotonic() + DEADLINE
        while not self._healthy():
            assert self._process.poll() is None, f"the master ended: {self._log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, "the master does not answer"
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[1]}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@pytest.fixture(scope="session")
def _master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(tmp_path_factory.mktemp("store") / "master.log")
    yield master
    master.kill()


@pytest.fixture
def master(_master: Master) -> Master:
    """One that knows nothing: pods of the test before that were killed would be sent blocks for ten seconds more."""
    _master.kill()
    _master.start()
    return _master


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine does slowly is done all the same; what is lost is told by Mooncake itself."""
    monkeypatch.setattr(sharing, "LOOKUP_SECONDS", DEADLINE)
    monkeypatch.setattr(store, "FETCH_SECONDS", DEADLINE)
    monkeypatch.setattr(store, "BATCH_SECONDS", DEADLINE / 2)


@pytest.fixture(scope="session")
def maker(tiny_checkpoint: Path) -> Maker:
    return Maker(tiny_checkpoint)
