"""A container that is killed starts again in the same pod: what its last run left behind is still there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from glm52_engine.config import DrainConfig, EngineConfig, ModelConfig, RoleConfig
from glm52_engine.lifecycle.start import bind
from glm52_engine.local import die_with_parent

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
SECONDS = 120.0
MODEL = "glm-5.2"

INSIDE = Path("/mnt")
INIT = f"""
set -e
mount --bind "$FOLDER" {INSIDE}
mount --bind "$SHM" /dev/shm
case "$ROOT" in /tmp/*) # a checkout there would be gone with the machine's /tmp
  mkdir -p "$SCRATCH/${{ROOT#/tmp/}}"
  mount --bind "$ROOT" "$SCRATCH/${{ROOT#/tmp/}}"
esac
mount --rbind "$SCRATCH" /tmp
cd "$ROOT"
exec "$@"
"""
"""As in a container: the engine is PID 1, and /dev/shm and /tmp are the pod's, which outlive it."""


def namespaces() -> list[str]:
    asked = ["unshare", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
    return asked if os.geteuid() == 0 else [*asked, "--user", "--map-root-user"]


@dataclass
class Container:
    """One container of a pod, started again and again with the same name, port and volumes."""

    folder: Path
    name: str
    command: list[str]
    port: int
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / f"{self.name}.log"
        for each in (self.shm, self.scratch):
            each.mkdir()

    @property
    def shm(self) -> Path:
        return self.folder / f"{self.name}-shm"

    @property
    def scratch(self) -> Path:
        return self.folder / f"{self.name}-tmp"

    def start(self) -> None:
        run = [sys.executable, "-m", "glm52_engine.cli", *self.command, "--host", "127.0.0.1", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*namespaces(), "sh", "-c", INIT, "sh", *run],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT / "engine"),
                    "POD_NAME": self.name,
                    "ROOT": str(ROOT),
                    "FOLDER": str(self.folder),
                    "SHM": str(self.shm),
                    "SCRATCH": str(self.scratch),
                },
                preexec_fn=die_with_parent(),
            )

    def until_ready(self) -> None:
        limit = time.monotonic() + SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                assert self.process is not None
                said = self.log.read_text(errors="replace")[-2000:]
                assert self.process.poll() is None, f"{self.name} ended: {said}"
                assert time.monotonic() < limit, f"{self.name} is not ready: {said}"
                time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL for the engine itself, as the kernel's OOM killer sends it."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert self.process.wait(SECONDS) != 0

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(SECONDS)


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def pods(tmp_path: Path, tiny_checkpoint: Path) -> Iterator[list[Container]]:
    """Prefill, decode and router."""
    if subprocess.run([*namespaces(), "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no namespaces: what a container is cannot be made")
    role = RoleConfig(ranks_per_host=1, host_pool_gib=1, max_num_seqs=4)
    config = EngineConfig(
        model=ModelConfig(name=MODEL, path=str(INSIDE / "checkpoint"), max_model_len=256, weights_gib=1),
        prefill=role,
        decode=role,
        drain=DrainConfig(window_seconds=5),
    )
    shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "token").write_text("secret")
    own = ["--config", str(INSIDE / "config.json"), "--token-file", str(INSIDE / "token")]
    own += ["--propagation-seconds", "0"]
    made = [Container(tmp_path, name, ["serve", "--role", name, *own], free_port()) for name in ("prefill", "decode")]
    urls = [arg for each in made for arg in (f"--{each.name}-url", f"http://127.0.0.1:{each.port}")]
    made.append(Container(tmp_path, "router", ["router", *own, *urls], free_port()))
    try:
        yield made
    finally:
        for each in made:
            each.end()


def ask(router: Container) -> str:
    body = {"model": MODEL, "prompt": list(b"what is left behind"), "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{router.port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: Any = json.load(response)
    return str(answer["choices"][0]["text"])


def left(container: Container) -> int:
    """Bytes in the pod's shared memory."""
    return sum(file.stat().st_size for file in container.shm.rglob("*") if file.is_file())


def test_what_a_killed_run_left_behind_stops_no_start_and_does_not_pile_up(pods: list[Container]) -> None:
    prefill, decode, router = pods
    for each in pods:
        each.start()
    for each in pods:
        each.until_ready()
    expected = ask(router)
    before = {each.name: left(each) for each in (prefill, decode)}
    for each in (prefill, decode):
        # As a library leaves it that had no time to clean up.
        (each.shm / "nccl-of-a-former-run").write_bytes(b"x" * 4096)
        each.kill()
        each.start()
        each.until_ready()
        assert left(each) <= before[each.name]
    router.until_ready()
    assert ask(router) == expected
