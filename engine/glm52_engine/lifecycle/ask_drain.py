"""`glm52-engine drain`, the preStop hook: asks this pod to drain and waits. Standard library only."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from typing import Any

from glm52_engine.config import INTERNAL_TOKEN_HEADER, ConfigError
from glm52_engine.lifecycle.start import read_token
from glm52_engine.sizing import PROPAGATION_SECONDS

SLICE_SECONDS = 5.0
"""The server answers within this time; one that does not is frozen, and waiting would eat the grace period."""

ANSWER_SECONDS = SLICE_SECONDS + 5.0


DEFAULT_WINDOW_SECONDS = 60.0


def drain_limit(config: str) -> float:
    """Propagation + the deployment's window; a config that cannot be read must not make the hook fail."""
    try:
        window = float(json.loads(Path(config).read_text())["drain"]["window_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        window = DEFAULT_WINDOW_SECONDS
    return PROPAGATION_SECONDS + window + 1.0


def ask_drain(*, port: int, token_file: str, limit: float, host: str = "127.0.0.1") -> str:
    """Returns one line that says how it went; never raises, never takes longer than `limit` seconds."""
    began = time.monotonic()
    try:
        token = read_token(token_file).sent
    except ConfigError as error:
        return f"drain: {error}; TERM will drain instead"
    while True:
        left = limit - (time.monotonic() - began)
        if left <= 0:
            return f"drain: the window is over after {limit:.0f} s; TERM ends what is left"
        try:
            answer = _post(
                host, port, token, wait=max(0.0, min(SLICE_SECONDS, left - 1)), timeout=min(ANSWER_SECONDS, left)
            )
        except (OSError, ValueError, http.client.HTTPException) as error:
            return f"drain: the server does not answer ({error or type(error).__name__}); nothing to wait for"
        if answer is None:
            return "drain: this pod takes no requests; TERM has the first pod of its replica drain"
        if answer.get("drained"):
            return f"drain: nothing is in flight after {time.monotonic() - began:.1f} s"
        if answer.get("overdue"):
            return f"drain: the window is over, {answer.get('in_flight')} still in flight"


def _post(host: str, port: int, token: str, *, wait: float, timeout: float) -> dict[str, Any] | None:
    """None from a rank host, which has its probes and no API."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        body = json.dumps({"wait_seconds": wait})
        headers = {INTERNAL_TOKEN_HEADER: token, "content-type": "application/json"}
        connection.request("POST", "/internal/v1/drain", body, headers)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status == 404:
        return None
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}")
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise ValueError("no object in the answer")
    return answer
