from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from glm52_engine.lifecycle import ask_drain as module
from glm52_engine.lifecycle.ask_drain import ask_drain, drain_limit


@pytest.fixture
def token(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text("secret\n")
    return str(file)


class Server:
    """Answers drain calls with the given objects, the last one forever."""

    def __init__(self, *answers: dict[str, object], status: int = 200) -> None:
        self.calls: list[dict[str, object]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.calls.append({**body, "token": self.headers["X-Glm52-Internal-Token"], "path": self.path})
                answer = json.dumps(answers[min(len(server.calls), len(answers)) - 1]).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for server in made:
        server.http.shutdown()
        server.http.server_close()


def test_waits_until_nothing_is_in_flight(token: str, servers: list[Server]) -> None:
    server = Server({"drained": False, "in_flight": 2}, {"drained": True, "in_flight": 0})
    servers.append(server)
    line = ask_drain(port=server.port, token_file=token, limit=20)
    assert line.startswith("drain: nothing is in flight")
    assert [(call["token"], call["path"]) for call in server.calls] == [("secret", "/internal/v1/drain")] * 2


def test_says_what_is_left_when_the_window_is_over(token: str, servers: list[Server]) -> None:
    server = Server({"drained": False, "overdue": True, "in_flight": 3})
    servers.append(server)
    assert ask_drain(port=server.port, token_file=token, limit=20).endswith("the window is over, 3 still in flight")


def test_a_rank_host_has_nothing_to_drain(token: str, servers: list[Server]) -> None:
    servers.append(Server({}, status=404))
    assert "the first pod of its replica" in ask_drain(port=servers[0].port, token_file=token, limit=20)


def test_a_server_that_is_gone_is_nothing_to_wait_for(token: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        line = ask_drain(port=taken.getsockname()[1], token_file=token, limit=20)
    assert "does not answer" in line


def test_a_frozen_server_does_not_eat_the_grace_period(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        began = time.monotonic()
        line = ask_drain(port=frozen.getsockname()[1], token_file=token, limit=60)
    assert "does not answer" in line
    assert time.monotonic() - began < 5


def test_without_a_token_it_says_so(tmp_path: Path) -> None:
    assert "cannot be read" in ask_drain(port=1, token_file=str(tmp_path / "none"), limit=1)


def test_the_limit_is_the_window_of_the_config_plus_the_propagation(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"drain": {"window_seconds": 900}}))
    assert drain_limit(str(config)) == 906
    assert drain_limit(str(tmp_path / "none")) == 66
