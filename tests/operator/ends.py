"""Pods whose containers have ended, as the API server would hand them out."""

from __future__ import annotations

import datetime
from typing import Any

from glm52_engine.config import EXIT_CODES, Outcome, Termination
from glm52_operator.desired.target import Object
from tests.operator.builders import pod

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def at(seconds: float) -> datetime.datetime:
    return NOW + datetime.timedelta(seconds=seconds)


def stamp(seconds: float) -> str:
    return at(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def told(outcome: Outcome, message: str = "because", **more: Any) -> str:
    host = more.pop("host", "chat-decode-0")
    return Termination(outcome=outcome, role="decode", host=host, message=message, **more).encode()


def terminated(seconds: float, code: int = 70, **more: Any) -> dict[str, Any]:
    """A terminated state; `seconds` after NOW."""
    stamped = stamp(seconds)
    return {
        "exitCode": code,
        "reason": "Error",
        "finishedAt": stamped,
        "containerID": f"containerd://{stamped}",
        **more,
    }


def crashed(seconds: float, message: str = "boom", **more: Any) -> dict[str, Any]:
    words = told(Outcome.CRASHED, message, marker="CRASH_chat-decode-0", **more)
    return terminated(seconds, EXIT_CODES[Outcome.CRASHED], message=words)


def with_container(name: str, state: Any, last: Any = None, **more: Any) -> Object:
    """A pod with one engine container; `state` and `last` as the kubelet writes them."""
    status: dict[str, Any] = {"name": "engine", "state": state, "restartCount": 1, "ready": False}
    if last is not None:
        status["lastState"] = {"terminated": last}
    leaves = more.pop("leaves", None)
    made = pod(name, containerStatuses=[status], node=more.pop("node", "worker"), **more)
    made["status"]["podIP"] = "10.0.0.9"
    if leaves is not None:
        told_at, grace = leaves
        made["metadata"] |= {"deletionTimestamp": stamp(told_at + grace), "deletionGracePeriodSeconds": grace}
    return made


RUNNING: dict[str, Any] = {"running": {"startedAt": stamp(-1000)}}
BACKING_OFF: dict[str, Any] = {"waiting": {"reason": "CrashLoopBackOff"}}
