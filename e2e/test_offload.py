"""HiSparse on decode and the store of prefixes in one deployment, which is examples/hisparse-and-store.yaml; in the end
decode has a part of the store, too."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.kube import Kubectl, Object, condition, total, until, wait_ready
from e2e.manifests import deployment
from e2e.reference import Reference
from glm52_engine.sizing import GIB, MIB

pytestmark = pytest.mark.cluster

FILE = Path(__file__).parent.parent / "examples/hisparse-and-store.yaml"
NAME = "sparse"
PREFILL = (f"{NAME}-prefill-0", f"{NAME}-prefill-1")
DECODE = f"{NAME}-decode-0"
BLOCK = 64
HEAD = 5
"""Blocks that prompts have in common."""

OWN = 10
"""Tokens behind them."""

OUTPUT = 6
"""Tokens of an answer."""


@pytest.fixture(scope="module")
def sparse(kube: Kubectl) -> Iterator[Kubectl]:
    kube.apply(yaml.safe_load(FILE.read_text()))
    wait_ready(kube, NAME)
    yield kube
    kube("delete", "glm52", NAME, "--wait=false")


def prompt(head: int, own: int) -> list[int]:
    """HEAD whole blocks and OWN tokens, each part drawn from its own seed."""
    drawn = [
        random.Random(head).choices(range(32, 127), k=HEAD * BLOCK),
        random.Random(own).choices(range(32, 127), k=OWN),
    ]
    return [*drawn[0], *drawn[1]]


def ask(kube: Kubectl, tokens: list[int], answer: int = OUTPUT) -> list[int]:
    """Greedy token ids, through the router by the API server's proxy: it needs no port of its own."""
    body = {"model": "glm-5.2", "prompt": tokens, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
    path = f"/api/v1/namespaces/{kube.namespace}/services/{NAME}-router:http/proxy/v1/completions"
    told = kube("create", "--raw", path, "-f", "-", input=json.dumps({**body, "return_token_ids": True}))
    ids: list[int] = json.loads(told.stdout)["choices"][0]["token_ids"]
    return ids


def counted(kube: Kubectl, pod: str) -> dict[str, float]:
    samples = kube.metrics(pod)
    return {
        "computed": total(samples, "glm52_prompt_tokens_computed_total"),
        "fetched": total(samples, "glm52_store_blocks_fetched_total"),
        "saved": total(samples, "glm52_store_blocks_saved_total"),
        "up": total(samples, "glm52_store_up"),
    }


def everywhere(kube: Kubectl, name: str) -> float:
    return sum(counted(kube, pod)[name] for pod in PREFILL)


def engine(pod: Object | None) -> Object:
    assert pod is not None
    return next(c for c in pod["spec"]["containers"] if c["name"] == "engine")


@pytest.mark.parametrize(
    ("pod", "role", "size", "said"),
    [
        pytest.param(PREFILL[0], "prefill", 5632 * MIB, "1 rank × 1 GiB host pool + 1 GiB store", id="prefill"),
        pytest.param(DECODE, "decode", 4096 * MIB, "1 rank × 1 GiB host pool + 1 GiB weights", id="decode"),
    ],
)
def test_memory_is_limited_as_sized(sparse: Kubectl, pod: str, role: str, size: int, said: str) -> None:
    resources = engine(sparse.get("pod", pod))["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    # What the kernel holds the container to, and not what was asked for.
    limit = sparse("exec", pod, "-c", "engine", "--", "python3", "-c", READ_LIMIT).stdout
    assert int(limit) == size
    status: Any = (sparse.get("glm52", NAME) or {})["status"]
    assert said in status[role]["memory"]["explanation"]
    assert f"{size / GIB:g} GiB = " in status[role]["memory"]["explanation"]


READ_LIMIT = "from glm52_engine.runtime.preflight import memory_limit; print(memory_limit()[0])"


def test_only_prefill_has_a_store_and_only_decode_hot_buffers(sparse: Kubectl) -> None:
    configs = {}
    for pod in (PREFILL[0], DECODE):
        found = sparse.get("pod", pod)
        assert found is not None
        configs[pod] = json.loads(found["metadata"]["annotations"]["glm52.dev/config"])
    assert "store" in configs[PREFILL[0]]["prefill"]
    assert "hi_sparse" not in configs[PREFILL[0]]["prefill"]
    assert "hi_sparse" in configs[DECODE]["decode"]
    assert "store" not in configs[DECODE]["decode"]
    assert not [name for name in sparse.metrics(DECODE) if name.startswith("glm52_store")]
    # The client is a process of its own, where there is one.
    clients = {pod: int(sparse("exec", pod, "-c", "engine", "--", "python3", "-c", COUNT).stdout) for pod in configs}
    assert clients == {PREFILL[0]: 1, DECODE: 0}


COUNT = """
import pathlib
lines = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')]
print(sum(b'glm52_engine.offload.client' in line.split(b'\\0') for line in lines))
"""


def test_the_second_prefill_pod_computes_only_the_rest(sparse: Kubectl) -> None:
    until("both pods have the store", lambda: everywhere(sparse, "up") == len(PREFILL), timeout=60)
    saved = everywhere(sparse, "saved")
    first = ask(sparse, prompt(1, 1))
    until("the prefix is in the store", lambda: everywhere(sparse, "saved") == saved + HEAD, timeout=60)
    before = {pod: counted(sparse, pod) for pod in PREFILL}
    # The router takes turns among pods that have nothing to do: of two requests each pod gets one.
    again = [ask(sparse, prompt(1, own)) for own in (1, 2)]
    assert again[0] == first
    moved = {pod: {k: v - before[pod][k] for k, v in counted(sparse, pod).items()} for pod in PREFILL}
    assert [moved[pod]["computed"] for pod in PREFILL] == [OWN, OWN]
    assert sorted(moved[pod]["fetched"] for pod in PREFILL) == [0, HEAD]


@pytest.mark.runbook("Share prefixes between prefill pods")
def test_a_killed_master_costs_computation_and_no_request(sparse: Kubectl) -> None:
    asked = [prompt(2, own) for own in range(4)]
    expected = [ask(sparse, tokens) for tokens in asked]
    before = {pod: sparse.get("pod", pod) for pod in (*PREFILL, DECODE)}
    master = sparse.list("pods", f"glm52.dev/name={NAME},app.kubernetes.io/component=store")
    sparse("delete", "pod", master[0]["metadata"]["name"], "--grace-period=0", "--force", "--wait=false")
    fresh = [prompt(3, own) for own in range(4)]
    while_gone = [ask(sparse, tokens) for tokens in (*asked, *fresh)]
    assert while_gone[: len(asked)] == expected
    until("both pods have a store again", lambda: everywhere(sparse, "up") == len(PREFILL), timeout=120)
    assert [ask(sparse, tokens) for tokens in (*asked, *fresh)] == while_gone
    for name, pod in before.items():
        now = sparse.get("pod", name)
        assert pod is not None
        assert now is not None
        assert now["metadata"]["uid"] == pod["metadata"]["uid"]
        assert [c["restartCount"] for c in now["status"]["containerStatuses"]] == [0]


@pytest.mark.runbook("Share prefixes between prefill pods")
def test_the_second_turn_of_a_conversation_finds_what_decode_has_saved(sparse: Kubectl, reference: Reference) -> None:
    both = {"spec": {"kvCacheOffload": {"roles": ["prefill", "decode"]}}}
    sparse("patch", "glm52", NAME, "--type=merge", "-p", json.dumps(both))
    wait_ready(sparse, NAME, 600)
    members = (*PREFILL, DECODE)
    until("all pods have the store", lambda: all(counted(sparse, pod)["up"] for pod in members), timeout=60)
    first, was = prompt(4, 1), sum(counted(sparse, pod)["saved"] for pod in members)
    said = ask(sparse, first, 2 * BLOCK + OUTPUT)
    # The last token was never an input.
    whole = (len(first) + len(said) - 1) // BLOCK
    # Either role may be the first with a block of the prompt.
    until(
        "the turn is in the store",
        lambda: sum(counted(sparse, pod)["saved"] for pod in members) == was + whole,
        timeout=60,
        last=lambda: {pod: counted(sparse, pod) for pod in members},
    )
    assert counted(sparse, DECODE)["saved"] >= whole - HEAD
    before = {pod: counted(sparse, pod) for pod in members}
    second = [*first, *said, *prompt(5, 2)[-OWN:]]
    assert ask(sparse, second) == reference.greedy(second, OUTPUT)
    moved = {pod: {k: v - before[pod][k] for k, v in counted(sparse, pod).items()} for pod in members}
    assert sum(moved[pod]["computed"] for pod in PREFILL) == len(second) - whole * BLOCK
    # The pod that had the first turn has the prompt's blocks itself; the answer's nobody else than decode has computed.
    assert sum(moved[pod]["fetched"] for pod in PREFILL) in (whole, whole - HEAD)
    assert moved[DECODE]["fetched"] == moved[DECODE]["computed"] == 0


def test_a_pool_that_does_not_fit_is_refused_with_the_sum(kube: Kubectl) -> None:
    kube.apply(deployment("large", prefill={"replicas": 0}, decode={"ranksPerHost": 2, "hostPoolGiB": 100}))

    def said() -> Object:
        return condition(kube.get("glm52", "large"), "Schedulable")

    until("there is no room", lambda: said().get("reason") == "NoRoom", timeout=60, last=said)
    assert "A decode pod: 203.25 GiB = 2 ranks × 100 GiB host pool + 1 GiB weights" in said()["message"]
    assert "memory is short on" in said()["message"]
    kube("delete", "glm52", "large", "--wait=false")
