"""`glm52-engine local`: prefill, decode and router as child processes on loopback, without Kubernetes."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glm52_engine.config import (
    READYZ,
    STARTUPZ,
    Accelerator,
    ConfigError,
    DrainConfig,
    EngineConfig,
    HiSparseConfig,
    KvCacheDtype,
    ModelConfig,
    RoleConfig,
    Termination,
)
from glm52_engine.lifecycle.start import bind

LOOPBACK = "127.0.0.1"
WINDOW_SECONDS = 30
STOP_SECONDS = WINDOW_SECONDS + 20.0
LOOK_SECONDS = 0.2
SEATS = 16
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LocalOptions:
    model: str | None
    preset: str
    port: int
    prefill: int
    decode: int
    max_model_len: int
    kv_cache_dtype: KvCacheDtype
    hi_sparse: bool
    name: str
    accelerator: Accelerator


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    last_words: Path
    phase: str = ""

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def why_it_ended(self) -> str:
        """Its termination message, else the last line of its log."""
        with contextlib.suppress(OSError):
            words = Termination.decode(self.last_words.read_text())
            if words is not None:
                return f"{words.outcome}: {words.message}"
        with contextlib.suppress(OSError, IndexError):
            return self.log.read_text(errors="replace").strip().splitlines()[-1]
        return f"exit code {self.process.returncode}"


class Stop(Exception):
    """The user asked for the end."""


@dataclass(slots=True)
class Local:
    options: LocalOptions
    folder: Path
    children: list[Child] = field(default_factory=list)
    asked_to_stop: int = 0

    def run(self) -> int:
        """0 after TERM or Ctrl-C with everything drained; 1 when a child died, with its reason."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            self._start()
            self._announce()
            while True:
                self._look()
        except Stop:
            say("stopping: running requests finish first (Ctrl-C again: at once)")
        except Died as death:
            say(str(death))
            self._stop()
            return 1
        return self._stop()

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked_to_stop += 1
        if self.asked_to_stop > 1 and number == signal.SIGINT:
            for child in self.children:
                child.process.kill()

    def _start(self) -> None:
        router_socket = bind(LOOPBACK, self.options.port)
        model = Path(self.options.model) if self.options.model else self._make_checkpoint()
        self._write_config(model)
        engines = [("prefill", n) for n in range(self.options.prefill)]
        engines += [("decode", n) for n in range(self.options.decode)]
        for role, number in engines:
            self._spawn(f"{role}-{number}", ["serve", "--role", role], bind(LOOPBACK, 0))
        urls = [arg for child in self.children for arg in (f"--{child.name.split('-')[0]}-url", child.url)]
        self._spawn("router", ["router", *urls], router_socket)
        while not all(self._ready(child) for child in self.children):
            self._look()

    def _make_checkpoint(self) -> Path:
        out = self.folder / "checkpoint"
        say(f"making the checkpoint of preset {self.options.preset}")
        command = ["make-checkpoint", "--preset", self.options.preset, "--out", str(out)]
        maker = self._spawn("make-checkpoint", command, None)
        while maker.process.poll() is None:
            self._pause()
        self.children.remove(maker)
        if maker.process.returncode:
            raise Died(maker)
        return out

    def _write_config(self, model: Path) -> None:
        # All processes share the first GPU.
        share = max(1, 90 // (self.options.prefill + self.options.decode))
        role = RoleConfig(ranks_per_host=1, host_pool_gib=1, max_num_seqs=SEATS, gpu_memory_percent=share)
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        config = EngineConfig(
            model=ModelConfig(
                name=self.options.name,
                path=str(model),
                max_model_len=self.options.max_model_len,
                kv_cache_dtype=self.options.kv_cache_dtype,
                weights_gib=size // GIB + 1,
            ),
            prefill=role,
            decode=role.model_copy(update={"hi_sparse": HiSparseConfig()}) if self.options.hi_sparse else role,
            drain=DrainConfig(window_seconds=WINDOW_SECONDS),
            accelerator=self.options.accelerator,
        )
        (self.folder / "config.json").write_text(config.model_dump_json())
        token = self.folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))

    def _spawn(self, name: str, command: Sequence[str], listener: socket.socket | None) -> Child:
        """The child inherits its bound socket; ours is closed, so that a dead child refuses connections."""
        args = [sys.executable, "-m", "glm52_engine.cli", *command]
        if listener is not None:
            args += ["--config", str(self.folder / "config.json"), "--token-file", str(self.folder / "token")]
            args += ["--listen-fd", str(listener.fileno()), "--propagation-seconds", "0"]
        log, last_words = self.folder / f"{name}.log", self.folder / f"{name}.termination"
        with log.open("wb") as out:
            process = subprocess.Popen(
                args,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()] if listener is not None else [],
                env={**os.environ, "POD_NAME": name, "POD_IP": LOOPBACK, "TERMINATION_LOG": str(last_words)},
                # Ctrl-C is for us alone: we end the children in order.
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        port = 0
        if listener is not None:
            port = listener.getsockname()[1]
            listener.close()
        child = Child(name, process, port, log, last_words)
        self.children.append(child)
        return child

    def _ready(self, child: Child) -> bool:
        status, body = ask(child.port, STARTUPZ)
        phase = str(body.get("phase") or "") if status != 200 else "up"
        if phase and phase != child.phase:
            child.phase = phase
            say(f"{child.name}: {phase}")
        return status == 200 and ask(child.port, READYZ)[0] == 200

    def _announce(self) -> None:
        url = f"http://{LOOPBACK}:{self.children[-1].port}"
        body = {"model": self.options.name, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        say(f"ready: {url}/v1   logs: {self.folder}")
        say(f"try: curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'")
        say("Ctrl-C ends everything")

    def _look(self) -> None:
        self._pause()
        for child in self.children:
            if child.process.poll() is not None:
                raise Died(child)

    def _pause(self) -> None:
        if self.asked_to_stop:
            raise Stop
        time.sleep(LOOK_SECONDS)

    def _stop(self) -> int:
        """The router first, so that its running streams keep their engines; 0 when everyone left cleanly."""
        codes = []
        routers = [child for child in self.children if child.name == "router"]
        for group in (routers, [child for child in self.children if child not in routers]):
            for child in group:
                child.process.terminate()
            until = time.monotonic() + STOP_SECONDS
            codes += [wait(child.process, until) for child in group]
        return 0 if not any(codes) else 1


class Died(Exception):
    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.name} ended: {child.why_it_ended()}")


def wait(process: subprocess.Popen[bytes], until: float) -> int:
    try:
        return process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def ask(port: int, path: str) -> tuple[int, dict[str, object]]:
    """Status and JSON of a GET on loopback; (0, {}) when there is no answer yet."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=2)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, ValueError, http.client.HTTPException):
        return 0, {}
    finally:
        connection.close()


def die_with_parent() -> Callable[[], None] | None:
    """Linux: TERM for the child when we are killed, so that no orphan stays behind."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(1, int(signal.SIGTERM)) and None  # 1: PR_SET_PDEATHSIG


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Removed at a clean end; kept with its logs after a failure."""
    folder = Path(tempfile.mkdtemp(prefix="glm52-local-"))
    try:
        yield folder
    except BaseException:
        say(f"logs are in {folder}")
        raise
    shutil.rmtree(folder, ignore_errors=True)


def run_local(options: LocalOptions) -> int:
    """Blocks until TERM, Ctrl-C or the death of a child."""
    if options.model and not Path(options.model, "config.json").is_file():
        raise ConfigError(f"{options.model}: found no config.json; expected a checkpoint directory")
    with work_folder() as folder:
        return Local(options, folder).run()
