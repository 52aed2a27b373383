"""The deployment that is kept busy while things are done to it: two of everything, so that one may be missing."""

from __future__ import annotations

import json
from collections.abc import Iterable

from e2e.deployed import Deployed
from e2e.kube import Object
from e2e.manifests import deployment
from e2e.traffic import Answer, Failure

NAME = "busy"
PORT = 30083


def manifest() -> Object:
    return deployment(
        NAME,
        prefill={"replicas": 2},
        decode={"replicas": 2},
        router={"replicas": 2, "service": {"type": "NodePort", "nodePort": PORT}},
        drain={"windowSeconds": 20},
        crashPolicy={"backoffBaseSeconds": 1, "backoffMaxSeconds": 5},
    )


def legs_of(busy: Deployed, answers: Iterable[Answer]) -> dict[str, list[str]]:
    """Request id → what the routers logged of the legs that failed under it."""
    wanted = {answer.id for answer in answers}
    found: dict[str, list[str]] = {number: [] for number in wanted}
    for router in busy.pods("router"):
        for line in busy.kube("logs", router, "--tail=-1").stdout.splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("request_id") in wanted and entry.get("level") == "WARNING":
                found[entry["request_id"]].append(line)
    return found


def blamed_on(busy: Deployed, victim: Object, failed: list[Answer]) -> None:
    """Fails unless every failed request ran on that pod, and failed as a client can understand."""
    address = f"//{victim['status']['podIP']}:"
    legs = legs_of(busy, failed)
    for answer in failed:
        assert answer.failure is not Failure.WRONG, f"{answer.id}: {answer.error}"
        assert any(address in line for line in legs[answer.id]), f"{answer.id}: {answer.error}; {legs[answer.id]}"
