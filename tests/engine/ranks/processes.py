"""A replica as real processes on loopback: rank hosts by the product's own command, a leader that obeys the test."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from glm52_engine.config import DrainConfig, EngineConfig, HiSparseConfig, ModelConfig, RoleConfig, Termination
from glm52_engine.lifecycle.start import bind
from glm52_engine.local import die_with_parent
from tests.engine.ranks.forks import Fork

ROOT = Path(__file__).parents[3]
LOOPBACK = "127.0.0.1"
START_SECONDS = 240.0
GONE_SECONDS = 10.0
"""From a failure until every process is gone."""

BLOCK = 16
SEATS = 4


class Process:
    def __init__(
        self, folder: Path, name: str, args: Sequence[str], listen: int | None = None, *, forked: bool = False
    ) -> None:
        """`python ARGS`; `listen`: the descriptor that they name after --listen-fd. `forked`: see `forks.Fork`."""
        self.name = name
        self.log, self._last_words = folder / f"{name}.log", folder / f"{name}.termination"
        self._news = threading.Condition()
        self.lines: list[dict[str, Any]] = []
        env = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "engine"))),
            "POD_NAME": name,
            "TERMINATION_LOG": str(self._last_words),
        }
        with self.log.open("ab") as log:
            self.popen: Fork | subprocess.Popen[str]
            if forked:
                self.popen = Fork(args, stderr=log.fileno(), env=env, cwd=ROOT, listen=listen)
            else:
                self.popen = subprocess.Popen(
                    [sys.executable, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                    cwd=ROOT, pass_fds=[] if listen is None else [listen], env=env, preexec_fn=die_with_parent(),
                )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._news:
                self.lines.append(json.loads(line))
                self._news.notify_all()

    def tell(self, line: dict[str, Any]) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(line) + "\n")
        self.popen.stdin.flush()

    def says(self, field: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        """The first line with this field."""
        self.wait_until(lambda: any(field in line for line in self.lines), f"say {field!r}", seconds)
        return next(line for line in self.lines if field in line)

    def wait_until(self, condition: Any, what: str, seconds: float = START_SECONDS) -> None:
        until = time.monotonic() + seconds
        with self._news:
            while not condition():
                left = until - time.monotonic()
                assert left > 0, f"{self.name} did not {what}: {self.lines[-5:]}\n{self.log.read_text()[-3000:]}"
                self._news.wait(min(left, 0.2))
                assert self.popen.poll() is None or condition(), f"{self.name} ended:\n{self.log.read_text()[-3000:]}"

    def wait_log(self, text: str) -> None:
        self.wait_until(lambda: text in self.log.read_text(), f"log {text!r}")

    def last_words(self) -> Termination:
        words = Termination.decode(self._last_words.read_text())
        assert words is not None
        return words

    def gone(self, seconds: float = GONE_SECONDS) -> int:
        """The exit code of a process that ends by itself in time."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} is still here:\n{self.log.read_text()[-3000:]}") from None


class Replica:
    """`hosts` rank hosts beside a leader, `ranks` each; a rank costs a GiB of memory."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        *,
        hosts: int = 1,
        ranks: int = 1,
        launch_ahead: bool = False,
        forked: bool = False,
    ) -> None:
        self.folder, self.hosts, self.forked = folder, hosts, forked
        self.launch_ahead = launch_ahead
        self.token = folder / "token"
        self.token.write_text(secrets.token_hex(16))
        self.config = write_config(folder / "config.json", checkpoint, ranks)
        self.listeners = [bind(LOOPBACK, 0) for _ in range(hosts)]
        self.ports = [listener.getsockname()[1] for listener in self.listeners]
        self.processes: list[Process] = []

    def start_host(self, index: int, *, config: Path | None = None, through: Sequence[str] = ()) -> Process:
        """Rank host `index`, from 1. `through`: a module and its arguments, which runs the one that follows."""
        args = ["-m", *through, "glm52_engine.cli", "rank-host", "--role", "decode", "--hosts", str(self.hosts + 1)]
        args += ["--host-index", str(index), "--config", str(config or self.config), "--token-file", str(self.token)]
        fd = self.listeners[index - 1].fileno()
        return self._add(Process(self.folder, f"host-{index}", [*args, "--listen-fd", str(fd)], fd, forked=self.forked))

    def start_leader(self, *, config: Path | None = None, through: Sequence[str] = ()) -> Process:
        args = ["-m", *through, "tests.engine.ranks.leader", "--config", str(config or self.config)]
        args += ["--token-file", str(self.token)]
        args += [arg for port in self.ports for arg in ("--rank-host", f"{LOOPBACK}:{port}")]
        return self._add(
            Process(self.folder, "leader", args + ["--launch-ahead"] * self.launch_ahead, forked=self.forked)
        )

    def start(self, *, through: Sequence[str] = ()) -> tuple[Process, list[Process]]:
        hosts = [self.start_host(index + 1, through=through) for index in range(self.hosts)]
        leader = self.start_leader(through=through)
        leader.says("up")
        return leader, hosts

    def _add(self, process: Process) -> Process:
        self.processes.append(process)
        return process


@contextlib.contextmanager
def replica(folder: Path, checkpoint: Path, **options: Any) -> Iterator[Replica]:
    made = Replica(folder, checkpoint, **options)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGKILL)
            process.popen.wait()
        for listener in made.listeners:
            listener.close()


def write_config(path: Path, checkpoint: Path, ranks: int = 1) -> Path:
    role = RoleConfig(ranks_per_host=ranks, host_pool_gib=1, max_num_seqs=SEATS)
    config = EngineConfig(
        model=ModelConfig(name="m", path=str(checkpoint), max_model_len=256, weights_gib=1),
        prefill=role,
        # The ranks of a replica read through hot buffers: who is in lock-step must not depend on what it finds there.
        decode=role.model_copy(update={"hi_sparse": HiSparseConfig(mode="always")}),
        drain=DrainConfig(window_seconds=10),
        block_size=BLOCK,
    )
    path.write_text(config.model_dump_json())
    return path
