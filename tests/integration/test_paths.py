"""A path of KV that turns out slow, told by an operator process that asks a pod over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from e2e.controlplane.audit import Audit
from e2e.controlplane.operator import Installed
from e2e.controlplane.space import Space, deployment
from e2e.controlplane.standin import Kubelets, Life
from glm52_engine.config import API_PORT, READYZ
from glm52_operator.plan.paths import WELL

HURRY = 60
"""A minute is a second."""
ADDRESS = "127.52.0.1"
SLOW = {"peer": "chat-prefill-0", "bytes_per_second": 45_000_000, "best": 5_200_000_000, "slow": True}
WELL_AGAIN = {**SLOW, "bytes_per_second": 5_000_000_000, "slow": False}


@dataclass
class DecodePod:
    """The readiness endpoint of a decode pod."""

    paths: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0


@pytest.fixture
def decode_pod() -> Iterator[DecodePod]:
    pod = DecodePod()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == READYZ
            body = json.dumps({"status": "ready", "stage": "Ready", "kv_paths": pod.paths}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            pod.asked += 1

        def log_message(self, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer((ADDRESS, API_PORT), Answer)
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    yield pod
    server.shutdown()
    serving.join()
    server.server_close()


def told(space: Space, reason: str) -> list[str]:
    return [event["note"] for event in space.all_seen("Event") if event.get("reason") == reason]


def until_asked(space: Space, pod: DecodePod, times: int) -> None:
    """So often from now on."""
    limit = pod.asked + times
    space.until(f"the pod is asked {times} times", lambda: pod.asked >= limit or None, last=lambda: pod.asked)


def requests(audit: Audit) -> list[str]:
    """But those that keep the lease, and watches, which are renewed by the clock."""
    return [str(r) for r in audit.since() if r.resource != "leases" and r.verb != "watch"]


def test_a_slow_path_is_one_event_and_no_other_request(
    space: Space, installed: Installed, kubelets: Kubelets, decode_pod: DecodePod
) -> None:
    kubelets.live(Life(address=ADDRESS), space.name, "decode")
    audit = installed.audit()
    operator = installed.start(hurry=HURRY)
    space.apply(deployment("chat"))
    space.until_ready("chat")
    until_asked(space, decode_pod, 2)
    audit.mark()
    until_asked(space, decode_pod, 3)
    assert requests(audit) == []

    decode_pod.paths = [SLOW]
    space.until("it is told", lambda: told(space, "TransferSlow") or None)
    until_asked(space, decode_pod, 3)
    (note,) = told(space, "TransferSlow")
    assert note.startswith(
        "chat-decode-0 reads KV slowly from chat-prefill-0 at 45 MB/s (best of the others: 5200 MB/s)."
    )
    (written,) = requests(audit)
    assert " events " in written

    # What is known is kept in memory.
    operator.kill()
    operator.start()
    operator.until_ready()
    until_asked(space, decode_pod, 3)
    assert len(told(space, "TransferSlow")) <= 2

    decode_pod.paths = [WELL_AGAIN]
    until_asked(space, decode_pod, WELL + 1)
    space.until("it is told", lambda: told(space, "TransferRecovered") or None)
    until_asked(space, decode_pod, 2)
    assert len(told(space, "TransferRecovered")) == 1
    assert "Traceback" not in operator.text()
