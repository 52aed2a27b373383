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
from glm52_engine.sizing import (
    GIB,
    ROUTER_MEMORY,
    STORE_OVERHEAD,
    grace_period_seconds,
    host_memory,
    startup_budget_seconds,
)
from glm52_operator import names
from glm52_operator.desired.children import build
from glm52_operator.desired.config import engine_config
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
    def selectors(**spec: Any) -> dict[tuple[str, str], Any]:
        children = (c for c in build(target(**spec)) if "spec" in c)
        return {(c["kind"], c["metadata"]["name"]): c["spec"].get("selector") for c in children}

    changed = selectors(image="other:2", decode={"replicas": 7, "hostPoolGiB": 3})
    assert selectors().items() <= changed.items()


def test_selectors_match_the_pods_of_their_role_only() -> None:
    children = build(target(decode={"hostsPerReplica": 2}, prefill={"hostsPerReplica": 2}))
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
    several = {"hostsPerReplica": 2}
    assert child("Service", "chat-decode-hosts", decode=several)["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in child("Service", "chat-decode")["spec"]
    assert child("StatefulSet", "chat-decode")["spec"]["serviceName"] == "chat-decode-hosts"


WORKLOADS = {"prefill": "StatefulSet", "decode": "StatefulSet", "router": "Deployment"}


def template(component: str, **spec: Any) -> dict[str, Any]:
    return child(WORKLOADS[component], f"chat-{component}", **spec)["spec"]["template"]  # type: ignore[no-any-return]


def config(component: str, **spec: Any) -> EngineConfig:
    return EngineConfig.model_validate_json(template(component, **spec)["metadata"]["annotations"][names.CONFIG])


def test_pods_carry_the_contract_as_far_as_they_read_it() -> None:
    sizes: dict[str, Any] = {
        "prefill": {"prefixCache": False, "maxWaiting": 7},
        "decode": {"ranksPerHost": 2, "maxNumSeqs": 5},
    }
    prefill, decode, router = (config(component, **sizes) for component in WORKLOADS)
    assert (prefill.role("prefill").prefix_cache, prefill.role("prefill").max_waiting) == (False, 7)
    assert (decode.role("decode").ranks_per_host, decode.role("decode").max_num_seqs) == (2, 5)
    assert (prefill.decode, decode.prefill, router.prefill, router.decode) == (None, None, None, None)
    assert decode.model.path == "/models/tiny"
    assert router.discovery is not None
    assert (router.discovery.namespace, router.discovery.decode_service) == ("ns", "chat-decode")


def test_the_configuration_is_mounted_from_the_pod_itself() -> None:
    # What is shared would change under pods that were sized by the revision before.
    for component in WORKLOADS:
        volumes = {v["name"]: v for v in template(component)["spec"]["volumes"]}
        (item,) = volumes["config"]["downwardAPI"]["items"]
        assert item["path"] == "config.json"
        assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{names.CONFIG}']"


ALL = {"prefill", "decode", "router"}


@pytest.mark.parametrize(
    ("spec", "rolled"),
    [
        pytest.param({"decode": {"maxNumSeqs": 5}}, {"decode"}, id="seats of decode"),
        pytest.param({"decode": {"hostPoolGiB": 5}}, {"decode"}, id="pool of decode"),
        pytest.param({"prefill": {"prefixCache": False}}, {"prefill"}, id="prefix cache"),
        pytest.param({"model": {"preset": "tiny", "maxModelLen": 99}}, ALL, id="model length"),
        pytest.param({"drain": {"windowSeconds": 7}}, ALL, id="drain window"),
        pytest.param({"image": "engine:2"}, ALL, id="image"),
        pytest.param({"restart": "2026-01-02"}, ALL, id="restart"),
        pytest.param({"decode": {"replicas": 5}, "prefill": {"replicas": 5}}, set(), id="replicas"),
        pytest.param({"rollout": {"maxUnavailable": 2, "paused": True}}, set(), id="how to roll"),
        pytest.param({"suspend": True}, set(), id="suspend"),
        pytest.param({"router": {"service": {"type": "NodePort"}}}, set(), id="service"),
    ],
)
def test_a_change_rolls_the_pods_that_read_it_and_no_others(spec: dict[str, Any], rolled: set[str]) -> None:
    assert {component for component in WORKLOADS if template(component) != template(component, **spec)} == rolled


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        pytest.param({"image": "engine:2"}, False, id="image"),
        pytest.param({"model": {"preset": "demo"}}, False, id="preset"),
        pytest.param({"model": {"preset": "tiny", "kvCacheDtype": "bf16"}}, False, id="type of KV"),
        pytest.param({"accelerator": "nvidia"}, False, id="accelerator"),
        pytest.param({"model": {"path": "/models/a", "volume": {"emptyDir": {}}}}, False, id="checkpoint"),
        pytest.param({"decode": {"ranksPerHost": 2, "hostPoolGiB": 9}, "restart": "x"}, True, id="size"),
        pytest.param({"model": {"preset": "tiny", "maxModelLen": 99}}, True, id="model length"),
    ],
)
def test_the_kv_label_changes_with_what_lays_out_kv(spec: dict[str, Any], same: bool) -> None:
    def label(component: str, **spec: Any) -> str:
        return template(component, **spec)["metadata"]["labels"][names.KV]  # type: ignore[no-any-return]

    assert label("prefill", **spec) == label("decode", **spec)
    assert (label("decode", **spec) == label("decode")) is same


def test_nothing_runs_while_suspended_and_the_numbers_are_kept() -> None:
    spec: dict[str, Any] = {"decode": {"replicas": 5}, "suspend": True}
    assert {child(kind, f"chat-{c}", **spec)["spec"]["replicas"] for c, kind in WORKLOADS.items()} == {0}
    assert target(**spec).wanted("decode") == 5


def test_a_paused_rollout_also_holds_the_router() -> None:
    assert child("Deployment", "chat-router", rollout={"paused": True})["spec"]["paused"] is True
    assert "paused" not in child("Deployment", "chat-router")["spec"]


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({}, set()),
        ({"decode": {"replicas": 2}}, {"chat-decode"}),
        ({"decode": {"replicas": 2}, "rollout": {"maxUnavailable": 2}}, set()),
        ({"decode": {"replicas": 1, "hostsPerReplica": 2}}, {"chat-decode"}),
        ({"router": {"replicas": 2}}, {"chat-router"}),
        ({"decode": {"replicas": 2}, "suspend": True}, set()),
    ],
)
def test_there_are_budgets_for_what_has_more_pods_than_may_be_missing(spec: dict[str, Any], wanted: set[str]) -> None:
    found = {c["metadata"]["name"] for c in build(target(**spec)) if c["kind"] == "PodDisruptionBudget"}
    assert found == wanted


def test_single_hosts_need_no_names() -> None:
    found = {c["metadata"]["name"] for c in build(target(decode={"hostsPerReplica": 2})) if c["kind"] == "Service"}
    assert found == {"chat-prefill", "chat-decode", "chat-decode-hosts", "chat-router"}


def test_replicas_of_several_hosts_are_so_many_pods() -> None:
    several = target(decode={"replicas": 3, "hostsPerReplica": 4})
    sets = {c["metadata"]["name"]: c["spec"] for c in build(several) if c["kind"] == "StatefulSet"}
    assert (sets["chat-decode"]["replicas"], sets["chat-prefill"]["replicas"]) == (12, 1)
    budgets = {c["metadata"]["name"]: c["spec"] for c in build(several) if c["kind"] == "PodDisruptionBudget"}
    # The others go with the one that is evicted: room for them would be for hosts of other replicas.
    assert budgets["chat-decode"]["maxUnavailable"] == 1
    two = target(decode={"replicas": 3, "hostsPerReplica": 4}, rollout={"maxUnavailable": 2})
    assert two.disruptable("decode") == 5
    found = engine_config(several, "router").discovery
    assert found is not None
    assert (found.prefill_hosts, found.decode_hosts) == (1, 4)


def test_hosts_of_a_replica_find_each_other_by_their_number() -> None:
    def args(role: str) -> list[str]:
        return engine(role, decode={"hostsPerReplica": 4})["containers"][0]["args"]  # type: ignore[no-any-return]

    assert args("decode")[-4:] == ["--hosts", "4", "--domain", "chat-decode-hosts.ns.svc"]
    assert "--hosts" not in args("prefill")


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
    assert parse_quantity(resources["limits"]["memory"]) == host_memory(role, weights_gib=3, accelerator="cpu").per_host
    assert "cpu" not in resources["limits"]
    assert pod["terminationGracePeriodSeconds"] == grace_period_seconds(role, chosen.drain_config)
    probe = pod["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= startup_budget_seconds(
        role, weights_gib=3, accelerator="cpu"
    )


def test_on_gpus_every_rank_of_a_pod_has_one_and_weights_are_not_in_host_memory() -> None:
    spec: dict[str, Any] = {
        "accelerator": "nvidia",
        "model": {"preset": "tiny", "weightsGiB": 100},
        "decode": {"ranksPerHost": 4, "hostPoolGiB": 20, "gpuMemoryPercent": 80, "launchAhead": False},
    }
    chosen = target(**spec)
    resources = engine(**spec)["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "4"
    memory = chosen.memory("decode")
    assert parse_quantity(resources["limits"]["memory"]) == memory.per_host
    assert memory.weights == 0
    assert memory.overhead > target(decode={"ranksPerHost": 4}).memory("decode").overhead
    decode = engine_config(chosen, "decode")
    assert decode.accelerator == "nvidia"
    assert decode.decode is not None
    assert (decode.decode.gpu_memory_percent, decode.decode.launch_ahead) == (80, False)
    probe, other = (engine(**each)["containers"][0]["startupProbe"] for each in (spec, {**spec, "accelerator": "cpu"}))
    assert probe["failureThreshold"] > other["failureThreshold"], "kernels are compiled at the start"
    assert "nvidia.com/gpu" not in engine()["containers"][0]["resources"]["limits"]


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
    spec: dict[str, Any] = {"router": {"service": {"type": "NodePort", "nodePort": 30080}}}
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


@pytest.mark.parametrize(
    ("asked", "mode", "rows"),
    [({}, "auto", None), ({"deviceBufferSize": 6144}, "auto", 6144), ({"mode": "always"}, "always", None)],
)
def test_hot_buffers_are_for_decode(asked: dict[str, Any], mode: str, rows: int | None) -> None:
    config = engine_config(target(decode={"hiSparse": asked}), "decode")
    assert config.decode is not None
    assert config.decode.hi_sparse is not None
    assert (config.decode.hi_sparse.mode, config.decode.hi_sparse.device_buffer_size) == (mode, rows)
    assert target(decode={"hiSparse": asked}).role_config("prefill").hi_sparse is None
    assert target().role_config("decode").hi_sparse is None


def test_how_kv_crosses_reaches_both_roles_and_only_where_it_was_asked() -> None:
    asked = target(kvTransfer={"backend": "nixl", "netDevices": "mlx5_0:1,mlx5_1:1", "checksums": True})
    for role in ("prefill", "decode"):
        found = engine_config(asked, role).kv_transfer
        assert found is not None
        assert (found.net_devices, found.checksums) == ("mlx5_0:1,mlx5_1:1", True)
        assert engine_config(target(), role).kv_transfer is None
    assert engine_config(asked, "router").kv_transfer is None


STORE = {"roles": ["prefill"], "storeGiB": 3}


def test_a_store_of_prefixes_is_for_the_roles_that_are_named() -> None:
    asked = target(kvCacheOffload=STORE)
    config = engine_config(asked, "prefill").prefill
    assert config is not None
    assert config.store is not None
    assert (config.store.master, config.store.store_gib) == ("chat-store.ns.svc:50051", 3)
    assert engine_config(asked, "decode") == engine_config(target(), "decode")
    assert asked.memory("decode") == target().memory("decode")
    assert asked.memory("prefill").per_host - target().memory("prefill").per_host == 3 * GIB + STORE_OVERHEAD
    assert "+ 3 GiB store" in asked.memory("prefill").explain()
    assert "store" not in asked.memory("decode").explain()
    # What decode pods run is what they ran before: turning a store on is no reason to roll them.
    assert engine("decode", kvCacheOffload=STORE) == engine("decode")


def test_decode_has_a_part_of_the_store_of_its_own_where_it_is_named() -> None:
    both = target(kvCacheOffload={"roles": ["prefill", "decode"], "storeGiB": 3})
    config = engine_config(both, "decode").decode
    assert config is not None
    assert config.store == both.role_config("prefill").store
    for role in ("prefill", "decode"):
        assert both.memory(role).per_host - target().memory(role).per_host == 3 * GIB + STORE_OVERHEAD
        assert "+ 3 GiB store" in both.memory(role).explain()
    # The prefill pods run what they ran without decode's part.
    assert engine_config(both, "prefill") == engine_config(target(kvCacheOffload=STORE), "prefill")


def test_the_stores_master_is_a_workload_of_its_own() -> None:
    more = [(c["kind"], c["metadata"]["name"]) for c in build(target(kvCacheOffload=STORE))]
    less = [(c["kind"], c["metadata"]["name"]) for c in build(target())]
    assert set(more) - set(less) == {("Service", "chat-store"), ("Deployment", "chat-store")}
    deployment = child("Deployment", "chat-store", kvCacheOffload=STORE)["spec"]
    service = child("Service", "chat-store", kvCacheOffload=STORE)["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert service["selector"] == deployment["selector"]["matchLabels"]
    # No rollout, drain, crash count or Service of a role is about it.
    assert names.ROLE not in labels
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["args"] == ["store-master"]
    assert {port["containerPort"] for port in container["ports"]} >= {service["ports"][0]["port"]}
    assert [v["name"] for v in deployment["template"]["spec"]["volumes"]] == ["tmp"]
    assert child("Deployment", "chat-store", kvCacheOffload=STORE, suspend=True)["spec"]["replicas"] == 0
