"""What a deployment asks of the nodes: one sum, told everywhere, and whether they have it."""

from __future__ import annotations

from decimal import Decimal

from e2e.controlplane.client import Object
from e2e.controlplane.operator import Installed, Process
from e2e.controlplane.space import Space, deployment
from e2e.controlplane.standin import NODES, Kubelets, Life
from glm52_engine.sizing import SHARED_MEMORY, gib
from glm52_operator.plan.quantity import parse_quantity

STORE = {"roles": ["prefill"], "storeGiB": 7}
SPELLED: dict[str, Object] = {
    "mebibytes": {"emptyDir": {"sizeLimit": "2048Mi"}},
    "a-fraction": {"emptyDir": {"sizeLimit": "1.5Gi"}},
    "an-exponent": {"emptyDir": {"sizeLimit": "3e9"}},
    "a-number": {"emptyDir": {"sizeLimit": 4294967296}},
    "thousandths": {"emptyDir": {"sizeLimit": "5000000000000m"}},
    "a-claim": {
        "ephemeral": {
            "volumeClaimTemplate": {
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1024Gi"}}}
            }
        }
    },
}
"""Volumes as somebody may write them, and as no API server gives them back."""


def status(space: Space) -> Object:
    found: Object = (space.seen("GLM52Deployment", "chat") or {})["status"]
    return found


def test_a_pods_memory_is_one_sum_in_its_request_its_limit_and_the_status(space: Space, operator: Process) -> None:
    sizes = {"ranksPerHost": 2, "hostPoolGiB": 3}
    model = {"preset": "tiny", "weightsGiB": 5}
    space.apply(deployment("chat", model=model, prefill=sizes, decode=sizes, kvCacheOffload=STORE))
    space.until_ready("chat")
    for role in ("prefill", "decode"):
        memory = status(space)[role]["memory"]
        own = [memory["hostPools"], memory["weights"], memory["sharedMemory"], memory["overhead"]]
        store = [memory["store"]] if role == "prefill" else []
        assert own[:3] + store == ["6 GiB", "5 GiB", gib(SHARED_MEMORY)] + ["7 GiB"] * len(store)
        assert sum(map(amount, own + store)) == amount(memory["perHost"])
        written_out = [memory["perHost"], "2 ranks × 3 GiB host pool", *own[1:], *store]
        assert all(part in memory["explanation"] for part in written_out)
        (pod,) = space.pods("chat", role).values()
        (container,) = pod["spec"]["containers"]
        asked = [container["resources"][kind]["memory"] for kind in ("requests", "limits")]
        assert [parse_quantity(each) for each in asked] == [amount(memory["perHost"])] * 2


def amount(shown: str) -> Decimal:
    found = parse_quantity(shown.removesuffix("B").replace(" ", ""))
    assert found is not None, shown
    return found


def test_what_no_node_has_is_told_with_the_sum_and_a_smaller_size_heals(
    space: Space, operator: Process, kubelets: Kubelets
) -> None:
    kubelets.live(Life(bound=False), space.name, "decode")
    space.apply(deployment("chat", decode={"ranksPerHost": 3, "hostPoolGiB": 1000}))
    said = space.until_condition("chat", "Schedulable", status="False", reason="NoRoom")["message"]
    assert f"0 of {len(NODES)} nodes can hold a decode pod" in said
    assert "memory" in said
    # Why it is so much: the same sum as in the status.
    assert status(space)["decode"]["memory"]["explanation"] in said
    kubelets.live(Life(), space.name, "decode")
    space.edit("chat", decode={"hostPoolGiB": 1})
    space.until_ready("chat")
    assert space.condition("chat", "Schedulable")["reason"] == "Placed"


def test_an_amount_in_any_spelling_is_written_once(space: Space, installed: Installed) -> None:
    none = {"replicas": 0}
    spec = {"prefill": none, "decode": none, "router": none}
    for name, volume in SPELLED.items():
        space.apply(deployment(name, model={"path": "/models", "volume": volume}, **spec))
    audit = installed.audit()
    operator = installed.start()

    def settled() -> None:
        for name in SPELLED:
            space.until_condition(name, "Ready", reason="ScaledToZero")
            for role in ("prefill", "decode"):
                made = space.seen("StatefulSet", f"{name}-{role}")
                assert made is not None
                assert made["metadata"]["generation"] == 1

    settled()
    operator.kill()
    audit.mark()
    operator.start()
    operator.until_ready()
    # Every one is looked at by the new process, and again by a pass that an edit brings.
    for name in SPELLED:
        space.edit(name, crashPolicy={"maxRestarts": 5})
    settled()
    assert [str(r) for r in audit.since() if r.is_write and r.resource == "statefulsets"] == []
