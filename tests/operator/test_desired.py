"""The children of a deployment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.config import EngineConfig
from glm52_engine.sizing import GIB, ROUTER_MEMORY, grace_period_seconds, host_memory, startup_budget_seconds
from glm52_operator import names
from glm52_operator.desired.children import build
from glm52_operator.desired.pods import quantity
from glm52_operator.desired.secret import build_internal_secret
from glm52_operator.plan.quantity import parse_quantity
from tests.operator.builders import UID, target

GOLDEN = Path(__file__).parent / "golden" / "chat.yaml"


def child(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    found = [c for c in build(target(**spec)) if c["kind"] == kind and c["metadata"]["name"] == name]
    assert len(found) == 1
    return found[0]


def engine(role: str = "decode", **spec: Any) -> dict[str, Any]:
    return child("StatefulSet", f"chat-{role}", **spec)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def test_the_children_are_those_of_the_golden_file() -> None:
    # A change here is a change of what runs in clusters: renew the file only after reading the difference
    # (python -m tests.operator.renew_golden).
    assert build(target()) == list(yaml.safe_load_all(GOLDEN.read_text()))


def test_every_child_belongs_to_the_deployment() -> None:
    for obj in [*build(target()), build_internal_secret(target(), "t")]:
        (owner,) = obj["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (UID, True)
        assert obj["metadata"]["labels"][names.MANAGED_BY] == names.MANAGER
        assert obj["metadata"]["labels"][names.NAME] == "chat"
        assert obj["metadata"]["namespace"] == "ns"


def test_selectors_never_change_with_the_specification() -> None:
    def selectors(**spec: Any) -> list[Any]:
        return [c["spec"].get("selector") for c in build(target(**spec)) if "spec" in c]

    assert selectors() == selectors(image="other:2", decode={"replicas": 7, "hostPoolGiB": 3})


def test_selectors_match_the_pods_of_their_role_only() -> None:
    children = build(target())
    templates = {
        c["metadata"]["name"]: c["spec"]["template"]["metadata"]["labels"]
        for c in children
        if c["kind"] in ("StatefulSet", "Deployment")
    }
    for service in (c for c in children if c["kind"] == "Service"):
        wanted = service["spec"]["selector"]
        chosen = [name for name, labels in templates.items() if wanted.items() <= labels.items()]
        assert chosen == [service["metadata"]["name"].removesuffix("-hosts")]


def test_only_the_hosts_service_publishes_pods_that_are_not_ready() -> None:
    assert child("Service", "chat-decode-hosts")["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in child("Service", "chat-decode")["spec"]
    assert child("StatefulSet", "chat-decode")["spec"]["serviceName"] == "chat-decode-hosts"


def test_the_config_map_holds_the_contract() -> None:
    prefill, decode = {"prefixCache": False, "maxWaiting": 7}, {"ranksPerHost": 2, "maxNumSeqs": 5}
    text = child("ConfigMap", "chat-engine", prefill=prefill, decode=decode)["data"]["config.json"]
    config = EngineConfig.model_validate_json(text)
    assert (config.decode.ranks_per_host, config.decode.max_num_seqs) == (2, 5)
    assert (config.prefill.prefix_cache, config.prefill.max_waiting) == (False, 7)
    assert config.model.path == "/models/tiny"
    assert config.discovery is not None
    assert (config.discovery.namespace, config.discovery.decode_service) == ("ns", "chat-decode")


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"decode": {"maxNumSeqs": 5}}, id="seats"),
        pytest.param({"model": {"preset": "tiny", "maxModelLen": 99}}, id="model length"),
        pytest.param({"drain": {"windowSeconds": 7}}, id="drain window"),
    ],
)
def test_a_changed_configuration_rolls_every_pod_that_reads_it(spec: dict[str, Any]) -> None:
    for kind, name in (("StatefulSet", "chat-prefill"), ("StatefulSet", "chat-decode"), ("Deployment", "chat-router")):
        before = child(kind, name)["spec"]["template"]["metadata"]["annotations"]
        assert child(kind, name, **spec)["spec"]["template"]["metadata"]["annotations"] != before


def test_scaling_does_not_roll_pods() -> None:
    assert (
        child("StatefulSet", "chat-decode")["spec"]["template"]
        == child("StatefulSet", "chat-decode", decode={"replicas": 5})["spec"]["template"]
    )


def test_memory_and_budgets_come_from_the_contract() -> None:
    spec: dict[str, Any] = {
        "model": {"preset": "tiny", "weightsGiB": 3},
        "decode": {"ranksPerHost": 4, "hostPoolGiB": 20},
    }
    chosen = target(**spec)
    role = chosen.role_config("decode")
    pod = engine(**spec)
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert parse_quantity(resources["limits"]["memory"]) == host_memory(role, weights_gib=3).per_host
    assert "cpu" not in resources["limits"]
    assert pod["terminationGracePeriodSeconds"] == grace_period_seconds(role, chosen.drain_config)
    probe = pod["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= startup_budget_seconds(role, weights_gib=3)


def test_the_routers_memory_is_what_its_limit_on_bodies_is_made_for() -> None:
    (container,) = child("Deployment", "chat-router")["spec"]["template"]["spec"]["containers"]
    resources = container["resources"]
    assert parse_quantity(resources["requests"]["memory"]) == ROUTER_MEMORY
    assert parse_quantity(resources["limits"]["memory"]) == ROUTER_MEMORY


def test_a_preset_is_made_by_an_init_container_into_the_pod() -> None:
    pod = engine()
    (init,) = pod["initContainers"]
    assert init["args"] == ["make-checkpoint", "--preset", "tiny", "--out", "/models/tiny"]
    assert {"name": "models", "emptyDir": {}} in pod["volumes"]
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in pod["containers"][0]["volumeMounts"]}
    assert mounts["/models"] is True
    assert {m["mountPath"]: m.get("readOnly", False) for m in init["volumeMounts"]}["/models"] is False


def test_a_volume_is_mounted_as_given() -> None:
    source = {"persistentVolumeClaim": {"claimName": "glm"}}
    pod = engine(model={"path": "/models/x", "volume": source})
    assert "initContainers" not in pod
    assert {"name": "models", **source} in pod["volumes"]


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_pods_are_hardened(kind: str) -> None:
    for workload in (c for c in build(target()) if c["kind"] == kind):
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_only_routers_get_a_token_of_the_api_server() -> None:
    assert engine()["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in engine()
    router = child("Deployment", "chat-router")["spec"]["template"]["spec"]
    assert (router["automountServiceAccountToken"], router["serviceAccountName"]) == (True, "chat-router")


def test_a_node_port_is_taken_over() -> None:
    spec = {"router": {"service": {"type": "NodePort", "nodePort": 30080}}}
    service = child("Service", "chat-router", **spec)["spec"]
    assert (service["type"], service["ports"][0]["nodePort"]) == ("NodePort", 30080)


def test_the_longest_name_fits_every_label_and_service() -> None:
    name = "n" * names.MAX_NAME
    for obj in build(target(name)):
        assert len(obj["metadata"]["name"]) <= 63
        if obj["kind"] == "StatefulSet":
            # The pods' revision label: name, dash, and a hash of at most ten characters.
            assert len(obj["metadata"]["name"]) + 11 <= 63
        for value in obj["metadata"]["labels"].values():
            assert len(value) <= 63


def test_only_names_of_the_api_are_sent() -> None:
    def keys(node: Any) -> set[str]:
        if isinstance(node, dict):
            return set(node) | {key for value in node.values() for key in keys(value)}
        return {key for value in node for key in keys(value)} if isinstance(node, list) else set()

    text = json.dumps(build(target()))
    assert not [key for key in keys(json.loads(text)) if "_" in key and not key.startswith("config")]


@given(st.integers(min_value=1, max_value=1 << 50))
def test_a_quantity_is_exact(size: int) -> None:
    assert parse_quantity(quantity(size)) == size


def test_a_quantity_is_written_as_the_server_gives_it_back() -> None:
    assert [quantity(n) for n in (4 * GIB, 1536 << 20, 1000)] == ["4Gi", "1536Mi", "1000"]
