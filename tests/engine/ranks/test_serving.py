"""Whole replicas of two hosts each behind a router: prompts are computed, handed over and continued on ranks that
neither the leader of prefill nor that of decode has itself."""

from __future__ import annotations

import json
import re
import secrets
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from glm52_engine.config import INTERNAL_TOKEN_HEADER, READYZ, STARTUPZ, Outcome
from glm52_engine.lifecycle.start import bind
from glm52_engine.local import ask
from tests.engine.model.support import Ours
from tests.engine.ranks.processes import LOOPBACK, START_SECONDS, Process, write_config

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

HOSTS = 2
TOKENS = 12


class Deployment:
    """Prefill and decode, a leader and a rank host each with one rank a host, and a router."""

    through: Sequence[str] = ()
    """A module and its arguments, which runs the command of an engine."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(16)
        (folder / "token").write_text(self.token)
        write_config(folder / "config.json", checkpoint)
        self.processes: dict[str, Process] = {}
        self.ports: dict[str, int] = {}

    def start(self) -> None:
        for role in ("prefill", "decode"):
            self._start(f"{role}-1", "rank-host", "--role", role, "--hosts", str(HOSTS), "--host-index", "1")
            self._serve(f"{role}-0", "serve", "--role", role, "--rank-host", f"{LOOPBACK}:{self.ports[f'{role}-1']}")
        urls = [part for role in ("prefill", "decode") for part in (f"--{role}-url", self.url(f"{role}-0"))]
        self._serve("router", "router", *urls)

    def url(self, name: str) -> str:
        return f"http://{LOOPBACK}:{self.ports[name]}"

    def wait_until_ready(self) -> None:
        for name in ("prefill-0", "decode-0", "router"):
            self.wait_until(f"{name} is ready", lambda name=name: ask(self.ports[name], READYZ)[0] == 200)  # type: ignore[misc]

    def wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + START_SECONDS
        while not holds():
            for name, process in self.processes.items():
                assert process.popen.poll() is None, f"{name} ended:\n{process.log.read_text()[-3000:]}"
            assert time.monotonic() < until, f"not in time: {what}"
            time.sleep(0.1)

    def state(self, name: str) -> dict[str, Any]:
        return self._internal(name, "state", None)

    def prefill(self, prompt: list[int], name: str) -> dict[str, Any]:
        """What a router asks of prefill, and gets."""
        body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        return self._internal("prefill-0", "prefill", {"id": name, "endpoint": "completions", "body": body})

    def _internal(self, name: str, path: str, body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url(name)}/internal/v1/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={INTERNAL_TOKEN_HEADER: self.token, "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            found: dict[str, Any] = json.load(response)
            return found

    def end(self) -> None:
        for process in self.processes.values():
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait()

    def _serve(self, name: str, *args: str) -> None:
        self._start(name, *args, "--propagation-seconds", "0")

    def _start(self, name: str, *args: str, listener: socket.socket | None = None) -> None:
        listener = listener or bind(LOOPBACK, 0)
        self.ports[name] = listener.getsockname()[1]
        common = ["--config", str(self.folder / "config.json"), "--token-file", str(self.folder / "token")]
        through = () if args[0] == "router" else self.through
        command = ["-m", *through, "glm52_engine.cli", *args, *common, "--listen-fd", str(listener.fileno())]
        self.processes[name] = Process(self.folder, name, command, listener.fileno())
        listener.close()


@pytest.fixture(scope="module")
def deployment(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("replicas"), tiny_checkpoint)
    try:
        made.start()
        made.wait_until_ready()
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{deployment.url('router')}/v1", api_key="none", max_retries=0, timeout=120)


def prompt_of(number: int) -> list[int]:
    return [*b"row ", 48 + number % 10, *b"." * (3 + 11 * number)]


def said(client: openai.OpenAI, number: int) -> str:
    answer = client.completions.create(model="m", prompt=prompt_of(number), max_tokens=TOKENS, temperature=0)
    return answer.choices[0].text


def test_answers_are_those_of_one_rank(deployment: Deployment, client: openai.OpenAI, tiny_checkpoint: Path) -> None:
    ours = Ours(tiny_checkpoint)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda number: said(client, number), range(8)))
    alone = [said(client, number) for number in range(8)]
    assert together == alone
    for number, text in enumerate(together):
        expected = ours.greedy(prompt_of(number), TOKENS, chunk=1000)[:TOKENS]
        assert text == bytes(expected).decode(errors="replace")


def test_kv_is_held_and_read_where_the_rank_is(deployment: Deployment, client: openai.OpenAI) -> None:
    """Prompts held at once lie on both hosts; given up, they leave both; and what is asked then is answered."""
    held = [deployment.prefill(prompt_of(number), f"held-{number}") for number in range(4)]
    assert {answer["kv"]["rank"] for answer in held} == {0, 1}
    for number in range(4):
        deployment._internal("prefill-0", "kv/release", {"id": f"held-{number}"})
    answer = client.completions.create(model="m", prompt=prompt_of(1), max_tokens=TOKENS, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == TOKENS


def test_clients_that_leave_change_nobodys_answer(deployment: Deployment, client: openai.OpenAI) -> None:
    """Streams are cut off in the middle, on both hosts, beside requests that stay; nothing of them is left."""

    def leave(number: int) -> None:
        stream = client.completions.create(
            model="m", prompt=prompt_of(number), max_tokens=150, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        with stream:
            for _ in range(1 + number):
                next(iter(stream))

    with ThreadPoolExecutor(10) as pool:
        leaving = [pool.submit(leave, number) for number in range(6)]
        staying = list(pool.map(lambda number: said(client, number), range(4)))
        for each in leaving:
            each.result()
    assert staying == [said(client, number) for number in range(4)]
    until = time.monotonic() + 60
    for role in ("prefill", "decode"):
        while (found := deployment.state(f"{role}-0"))["running"] or found["blocks_free"] < found["blocks_total"]:
            assert time.monotonic() < until, found
            time.sleep(0.05)


def test_structured_outputs_fit_on_every_rank(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"row": {"enum": ["first", "second"]}, "count": {"type": "integer"}},
        "required": ["row", "count"],
        "additionalProperties": False,
    }
    shape: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}

    def asked(number: int) -> str:
        answer = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "row" * (1 + number)}],
            max_tokens=60,
            temperature=0,
            response_format=shape,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(asked, range(4)))
    for number, text in enumerate(together):
        assert re.match(r'\s*\{\s*"row"\s*:\s*"(first|second)"\s*,\s*"count"\s*:\s*-?\d', text), text
        assert asked(number) == text


def test_the_leader_tells_of_its_own_hot_buffers(deployment: Deployment, client: openai.OpenAI) -> None:
    said(client, 3)
    with urllib.request.urlopen(f"{deployment.url('decode-0')}/metrics", timeout=30) as response:
        found = dict(re.findall(r"^(\S*hisparse_\w+)\{.*\} (\S+)$", response.read().decode(), re.MULTILINE))
    assert float(found["vllm:hisparse_cache_misses_total"]) > 0
    assert float(found["vllm:hisparse_host_to_device_bytes_total"]) > 0
    assert float(found["glm52_hisparse_whole_ranks"]) == 0


def test_every_phase_of_the_start_is_told_for_every_host(deployment: Deployment) -> None:
    status, body = ask(deployment.ports["decode-0"], STARTUPZ)
    assert status == 200
    took = {(phase["host"], phase["name"]): phase["ended"] - phase["began"] for phase in body["phases"]}
    host = f"{LOOPBACK}:{deployment.ports['decode-1']}"
    each = {"starting the process", "reading the checkpoint's headers", "reading weights", "touching the pools"}
    alone = {"registering the KV pools for transfer", "joining and first steps"}
    assert {phase for of, phase in took if of == host} == each | alone
    assert {phase for of, phase in took if of == "decode-0"} >= each | alone | {
        "connecting to all hosts",
        "importing the engine",
        "everything",
    }
    assert max(took, key=lambda key: took[key]) == ("decode-0", "everything")
    with urllib.request.urlopen(f"{deployment.url('decode-0')}/metrics", timeout=30) as response:
        lines = [line for line in response.read().decode().splitlines() if "glm52_startup_phase_seconds{" in line]
    assert len(lines) == len(took)
    assert any(f'host="{host}",phase="reading weights"' in line for line in lines)


def test_a_drained_leader_ends_its_hosts_cleanly(deployment: Deployment) -> None:
    leader, host = deployment.processes["prefill-0"], deployment.processes["prefill-1"]
    leader.popen.send_signal(signal.SIGTERM)
    assert leader.gone(30) == 0
    assert host.gone() == 0
    assert (leader.last_words().consequence, host.last_words().consequence) == (False, True)


def test_a_host_that_is_asked_to_end_has_its_leader_drain(deployment: Deployment) -> None:
    leader, host = deployment.processes["decode-0"], deployment.processes["decode-1"]
    host.popen.send_signal(signal.SIGTERM)
    assert leader.gone(30) == 0
    assert host.gone() == 0
    assert (leader.last_words().consequence, host.last_words().consequence) == (True, False)
    assert "was asked to end" in leader.last_words().message


@pytest.fixture(scope="module")
def late(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, socket.socket]]:
    """A leader whose host is not there, and the place where it will be called."""
    made, place = Deployment(tmp_path_factory.mktemp("late"), tiny_checkpoint), bind(LOOPBACK, 0)
    try:
        where = f"{LOOPBACK}:{place.getsockname()[1]}"
        made._serve("decode-0", "serve", "--role", "decode", "--rank-host", where)
        yield made, place
    finally:
        made.end()


def test_a_leader_waits_for_a_host_that_has_no_node_yet(late: tuple[Deployment, socket.socket]) -> None:
    """However long: the startup probe must not end it for what only the cluster can bring."""
    made, place = late

    def held() -> bool:
        status, body = ask(made.ports["decode-0"], STARTUPZ)
        waits = f"waiting for rank host {LOOPBACK}:{place.getsockname()[1]} (Connection refused)"
        return (status, body.get("status"), body.get("phase")) == (200, "held", waits)

    made.wait_until("it waits", held)
    assert ask(made.ports["decode-0"], READYZ)[0] == 503
    host = ("rank-host", "--role", "decode", "--hosts", str(HOSTS), "--host-index", "1")
    made._start("decode-1", *host, listener=place)
    made.wait_until("it is ready", lambda: ask(made.ports["decode-0"], READYZ)[0] == 200)


def test_a_leader_that_lost_a_host_says_that_it_only_followed(late: tuple[Deployment, socket.socket]) -> None:
    leader, host = late[0].processes["decode-0"], late[0].processes["decode-1"]
    host.popen.send_signal(signal.SIGKILL)
    assert leader.gone(30) == 70
    words = leader.last_words()
    assert (words.outcome, words.consequence, words.rank) == (Outcome.CRASHED, True, 1)
    assert words.marker == "CRASH_decode-0"
    assert "rank host" in words.message
