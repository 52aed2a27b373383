"""An edit that cannot run is told, and taking it back is enough."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.kube import Kubectl, condition, is_current, until, wait_ready
from e2e.manifests import deployment

pytestmark = pytest.mark.cluster

NAME = "rollback"

NOWHERE = "127.0.0.1:9/engine:404"
"""Refused at once by the node itself: a name that has to be looked up keeps a closed network busy for a minute."""


def edit(kube: Kubectl, **spec: Any) -> None:
    kube("patch", "glm52", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))


@pytest.fixture(scope="module")
def running(kube: Kubectl) -> Kubectl:
    kube.apply(deployment(NAME, decode={"replicas": 2}, drain={"windowSeconds": 5}))
    wait_ready(kube, NAME)
    return kube


def test_a_bad_image_is_told_and_taking_it_back_heals_without_a_hand(running: Kubectl) -> None:
    edit(running, image=NOWHERE)
    until(
        "the image is named",
        lambda: condition(running.get("glm52", NAME), "DecodeReady").get("reason") == "ImagePullBackOff",
        timeout=150,
        last=lambda: running.get("glm52", NAME),
    )
    found = condition(running.get("glm52", NAME), "DecodeReady")
    assert NOWHERE in found["message"]
    assert condition(running.get("glm52", NAME), "Ready")["status"] == "False"
    # One pod at a time: the other replica and the router go on serving.
    ready = [p for p in running.list("pods", f"glm52.dev/name={NAME},glm52.dev/role=decode") if is_ready(p)]
    assert len(ready) == 1
    edit(running, image=None)
    wait_ready(running, NAME)


def is_ready(pod: Any) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))


def test_a_pod_that_no_node_can_hold_is_explained(kube: Kubectl) -> None:
    none = {"replicas": 0}
    kube.apply(deployment("huge", prefill=none, router=none, decode={"replicas": 1, "hostPoolGiB": 60000}))
    until(
        "the scheduler's words are told",
        lambda: condition(kube.get("glm52", "huge"), "DecodeReady").get("reason") == "Unschedulable",
        timeout=60,
        last=lambda: kube.get("glm52", "huge"),
    )
    found = condition(kube.get("glm52", "huge"), "DecodeReady")
    assert "Insufficient memory" in found["message"]
    assert "hostPoolGiB" in found["message"]
    assert not is_current(kube.get("glm52", "huge"), "Ready")
    kube("delete", "glm52", "huge")
