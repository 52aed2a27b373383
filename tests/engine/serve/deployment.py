"""Real pod processes' code, real HTTP, real NIXL, in one event loop; only the model is fake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from glm52_engine.config import (
    INTERNAL_TOKEN_HEADER,
    DrainConfig,
    EngineConfig,
    KvTransferConfig,
    ModelConfig,
    Role,
    RoleConfig,
)
from glm52_engine.lifecycle.start import InternalToken, bind
from glm52_engine.route.process import RouterOptions, run_router
from glm52_engine.serve import process
from glm52_engine.serve.process import Process, ServeOptions
from glm52_engine.tokenizer import Tokenizer
from tests.engine.serve.fakes import EngineStopped, FakeEngine

TOKEN = "secret"
TOKENS = InternalToken((TOKEN,))
HEADERS = {INTERNAL_TOKEN_HEADER: TOKEN}
MODEL = "glm-5.2"


def config(*, window: int = 20, max_model_len: int = 128) -> EngineConfig:
    role = RoleConfig(ranks_per_host=1, host_pool_gib=1, max_num_seqs=4)
    return EngineConfig(
        model=ModelConfig(name=MODEL, path="/none", max_model_len=max_model_len, weights_gib=1),
        prefill=role,
        decode=role,
        drain=DrainConfig(window_seconds=window),
        kv_transfer=KvTransferConfig(checksums=True),
        block_size=4,
    )


async def until(what: str, true: Callable[[], bool], seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


@dataclass
class RunningPod:
    role: Role
    engine: FakeEngine
    process: Process
    task: asyncio.Task[int]

    @property
    def url(self) -> str:
        return f"http://{self.process.pod.address}"

    @property
    def free(self) -> int:
        return self.engine.stats().blocks_free

    def idle(self) -> bool:
        return self.free == self.engine.stats().blocks_total and self.process.life.in_flight == 0

    async def end(self) -> int:
        self.process.terminate("test")
        return await asyncio.wait_for(self.task, 15)


@dataclass
class Deployment:
    session: aiohttp.ClientSession
    prefill: list[RunningPod] = field(default_factory=list)
    decode: list[RunningPod] = field(default_factory=list)
    url: str = ""

    @property
    def pods(self) -> list[RunningPod]:
        return [*self.prefill, *self.decode]

    async def post(self, path: str, body: Any, *, url: str = "", headers: dict[str, str] | None = None) -> Answer:
        kind: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post((url or self.url) + path, headers=headers or {}, **kind) as response:
            return Answer(
                response.status,
                await response.read(),
                {name.lower(): value for name, value in response.headers.items()},
            )

    async def internal(self, pod: RunningPod, path: str, body: Any) -> Answer:
        return await self.post(f"/internal/v1/{path}", body, url=pod.url, headers=HEADERS)

    async def idle(self) -> None:
        for pod in self.pods:
            await until(f"{pod.role} holds nothing", pod.idle)


@dataclass
class Answer:
    status: int
    raw: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.raw)


class Builder:
    """Starts pods and a router; ends them all at the end of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, session: aiohttp.ClientSession) -> None:
        self._monkeypatch = monkeypatch
        self._tokenizer = tokenizer
        self.session = session
        self.max_model_len = 128
        self._tasks: list[asyncio.Task[int]] = []
        self._processes: list[Process] = []

    async def pod(
        self,
        role: Role,
        engine: FakeEngine,
        *,
        window: int = 20,
        gate: threading.Event | None = None,
        phase: str = "a phase",
        port: int = 0,
    ) -> RunningPod:
        """A ready pod; with `gate` one that listens and loads until the gate opens, given back in that phase."""

        def load(config: EngineConfig, role: Role, on_phase: Callable[[str], None], **hosts: Any) -> Any:
            if gate is not None:
                on_phase("a phase")
                gate.wait(20)
            return engine, self._tokenizer, EngineStopped

        self._monkeypatch.setattr(process, "load_engine", load)
        options = ServeOptions(role=role, config="", token_file="", host="127.0.0.1", port=0, propagation=0)
        listener = bind("127.0.0.1", port)
        running = Process(options, config(window=window, max_model_len=self.max_model_len), TOKENS, listener)
        task = asyncio.create_task(running.run(), name="pod")
        self._processes.append(running)
        self._tasks.append(task)
        pod = RunningPod(role, engine, running, task)
        if gate is None:
            await until(f"{role} is ready", lambda: running.pod.loaded is not None or task.done())
        else:
            await until(f"{role} listens and loads", lambda: running.life.state.phase.startswith(phase))
            await self.answers(pod.url + "/livez")
        return pod

    async def deployment(
        self, prefill: Sequence[FakeEngine], decode: Sequence[FakeEngine], *, router: bool = True
    ) -> Deployment:
        made = Deployment(self.session)
        made.prefill = [await self.pod("prefill", engine) for engine in prefill]
        made.decode = [await self.pod("decode", engine) for engine in decode]
        if router:
            made.url = await self.router([p.url for p in made.prefill], [p.url for p in made.decode])
        return made

    async def router(self, prefill: list[str], decode: list[str], *, wait_seconds: float = 3, wait: bool = True) -> str:
        listener = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = RouterOptions("", "", "127.0.0.1", 0, prefill, decode, wait_seconds, propagation=0)
        self._tasks.append(asyncio.create_task(run_router(options, config(), TOKENS, listener)))
        if wait:
            await self.answers(url + "/readyz")
        return url

    async def answers(self, url: str) -> None:
        """Waits until a GET is answered with 200."""
        limit = time.monotonic() + 10
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.get(url) as response:
                    if response.status == 200:
                        return
            assert time.monotonic() < limit, f"no 200 from {url}"
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        for running in self._processes:
            running.terminate("end of test")
        pods = [task for task in self._tasks if task.get_name() == "pod"]
        if pods:
            await asyncio.wait(pods, timeout=8)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for running in self._processes:
            # A pod that had to be cancelled leaves NIXL's thread behind, and that aborts the interpreter at its exit.
            if running.pod.loaded is not None:
                running.pod.loaded.agent.close()


@contextlib.asynccontextmanager
async def builder(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> AsyncIterator[Builder]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        made = Builder(monkeypatch, Tokenizer.load(checkpoint), session)
        try:
            yield made
        finally:
            await made.end()


PROMPT = list(b"a prompt of some length")


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, **more}


def events(raw: bytes) -> list[Any]:
    """The data of each server-sent event; [DONE] as bytes."""
    lines = [line for line in raw.split(b"\n\n") if line]
    assert all(line.startswith(b"data: ") for line in lines), raw
    return [line[6:] if line[6:] == b"[DONE]" else json.loads(line[6:]) for line in lines]


async def state(made: Deployment, url: str) -> dict[str, Any]:
    async with made.session.get(url + "/internal/v1/state", headers=HEADERS) as response:
        assert response.status == 200
        found: dict[str, Any] = await response.json()
        return found


class Handoff:
    """A prefill done by hand, to be used wrongly."""

    def __init__(self, made: Deployment) -> None:
        self.made = made

    async def prefill(self, **more: Any) -> dict[str, Any]:
        call = {"id": uuid.uuid4().hex, "endpoint": "completions", "body": body(**more)}
        answer = await self.made.internal(self.made.prefill[0], "prefill", call)
        assert answer.status == 200, answer.raw
        return {**answer.json(), **call}

    async def decode(self, call: dict[str, Any]) -> Any:
        answer = await self.made.internal(self.made.decode[0], "decode", call)
        return answer.status, answer.json()


async def families(made: Deployment, url: str) -> list[Any]:
    async with made.session.get(url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return list(text_string_to_metric_families(await response.text()))


async def value(made: Deployment, url: str, name: str, **labels: str) -> float:
    """One sample of /metrics; 0 where it is not there."""
    for family in await families(made, url):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return 0.0
