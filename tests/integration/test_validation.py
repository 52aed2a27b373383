"""Every rule of the CRD: what the API server takes, and what it says when it does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.kube import Kubectl, Object
from glm52_operator.api.crd import crd
from tests.integration.conftest import ROOT, Server

REMOVE = object()


def deployment(changes: dict[str, Any], name: str = "probe") -> Object:
    """A good object with some paths set to something else."""
    obj: Object = {
        "apiVersion": "glm52.dev/v1alpha1",
        "kind": "GLM52Deployment",
        "metadata": {"name": name},
        "spec": {"model": {"preset": "tiny"}},
    }
    for path, value in changes.items():
        node = obj
        *parents, last = path.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is REMOVE:
            node.pop(last, None)
        else:
            node[last] = copy.deepcopy(value)
    return obj


PVC = {"persistentVolumeClaim": {"claimName": "c"}}


STORE = {"roles": ["prefill"], "storeGiB": 4}
BOTH = {"roles": ["prefill", "decode"], "storeGiB": 4}


def on_volume(path: Any = "/models/x", volume: Any = None, **changes: Any) -> dict[str, Any]:
    return {
        "spec.model.preset": REMOVE,
        "spec.model.path": path,
        "spec.model.volume": PVC if volume is None else volume,
        **changes,
    }


ACCEPTED: dict[str, dict[str, Any]] = {
    "the least": {},
    "a checkpoint on a volume": on_volume(),
    "the volume's root": on_volume("/models"),
    "dots within a name": on_volume("/models/a..b/glm-5.2"),
    "host path": on_volume(volume={"hostPath": {"path": "/data", "type": "Directory"}}),
    "nfs": on_volume(volume={"nfs": {"server": "s", "path": "/p"}}),
    "no replicas": {"spec.decode.replicas": 0, "spec.prefill.replicas": 0, "spec.router.replicas": 0},
    "most replicas": {"spec.decode.replicas": 1000},
    "a node port": {"spec.router.service": {"type": "NodePort", "nodePort": 30123}},
    "node port of the cluster's choice": {"spec.router.service": {"type": "NodePort"}},
    "load balancer": {"spec.router.service": {"type": "LoadBalancer", "nodePort": 30124}},
    "one back-off for all": {"spec.crashPolicy": {"backoffBaseSeconds": 60, "backoffMaxSeconds": 60}},
    "a base above the usual base": {"spec.crashPolicy": {"backoffBaseSeconds": 500}},
    "no drain": {"spec.drain.windowSeconds": 0},
    "a day's drain": {"spec.drain.windowSeconds": 86400},
    "sizes": {"spec.prefill": {"hostsPerReplica": 64, "ranksPerHost": 64, "hostPoolGiB": 65536, "maxNumSeqs": 4096}},
    "rollout": {
        "spec.rollout": {"maxUnavailable": 1000, "paused": True},
        "spec.restart": "2026-01-02",
        "spec.suspend": True,
    },
    "longest context": {"spec.model.maxModelLen": 1048576},
    "KV in FP8": {"spec.model.kvCacheDtype": "fp8"},
    "an image": {"spec.image": "registry.internal:5000/a/b@sha256:abc"},
    "a model name with slash": {"spec.model.name": "org/glm-5.2:fp8"},
    "devices for KV, every one": {"spec.kvTransfer": {"backend": "nixl", "netDevices": "auto"}},
    "devices for KV by name": {"spec.kvTransfer": {"netDevices": "mlx5_0:1,mlx5_1:1,eth0", "checksums": True}},
    "a store of prefixes": {"spec.kvCacheOffload": STORE},
    "a store of both roles": {"spec.kvCacheOffload": BOTH, "spec.decode.hostsPerReplica": 1},
    "a store, all said": {"spec.kvCacheOffload": STORE, "spec.prefill": {"prefixCache": True, "hostsPerReplica": 1}},
    "a store beside decode of several hosts": {"spec.kvCacheOffload": STORE, "spec.decode.hostsPerReplica": 2},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=list(ACCEPTED))
def test_taken(server: Server, changes: dict[str, Any]) -> None:
    taken, said = server(deployment(changes))
    assert taken, said


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "neither preset nor path": ({"spec.model": {}}, ["spec.model", "exactly one of model.preset"]),
    "no model": ({"spec": {"drain": {}}}, ["model", "equired"]),
    "no spec": ({"spec": REMOVE}, ["spec"]),
    "preset and path": (
        {"spec.model.path": "/models/x", "spec.model.volume": PVC},
        ["spec.model", "exactly one of model.preset"],
    ),
    "preset and volume": ({"spec.model.volume": PVC}, ["model.path and model.volume belong together"]),
    "path without volume": (
        on_volume(**{"spec.model.volume": REMOVE}),
        ["model.path and model.volume belong together", "/models"],
    ),
    "path elsewhere": (on_volume("/data/x"), ["spec.model.path", "must be /models or a directory under it"]),
    "path beside": (on_volume("/models-2/x"), ["spec.model.path"]),
    "path that climbs out": (on_volume("/models/../etc"), ["spec.model.path", "without '..'"]),
    "relative path": (on_volume("models/x"), ["spec.model.path"]),
    "empty path": (on_volume(""), ["spec.model.path"]),
    "unknown preset": ({"spec.model.preset": "huge"}, ["spec.model.preset", "tiny"]),
    "empty volume": (on_volume(volume={}), ["spec.model.volume", "at least 1"]),
    "two volume sources": (on_volume(volume={**PVC, "emptyDir": {}}), ["spec.model.volume", "at most 1"]),
    "node port on a ClusterIP": (
        {"spec.router.service.nodePort": 30080},
        ["spec.router.service.nodePort", "needs router.service.type NodePort"],
    ),
    "node port on an explicit ClusterIP": (
        {"spec.router.service": {"type": "ClusterIP", "nodePort": 30080}},
        ["spec.router.service.nodePort"],
    ),
    "node port too big": (
        {"spec.router.service": {"type": "NodePort", "nodePort": 70000}},
        ["spec.router.service.nodePort", "65535"],
    ),
    "back-off that begins above its end": (
        {"spec.crashPolicy": {"backoffBaseSeconds": 61, "backoffMaxSeconds": 60}},
        ["spec.crashPolicy.backoffBaseSeconds", "must be at most crashPolicy.backoffMaxSeconds"],
    ),
    "base above the usual end": (
        {"spec.crashPolicy": {"backoffBaseSeconds": 601}},
        ["spec.crashPolicy.backoffBaseSeconds", "must be at most crashPolicy.backoffMaxSeconds"],
    ),
    "no crash allowed": ({"spec.crashPolicy.maxRestarts": 0}, ["spec.crashPolicy.maxRestarts"]),
    "service type": ({"spec.router.service.type": "ExternalName"}, ["spec.router.service.type", "NodePort"]),
    "unknown field": ({"spec.decode.replica": 1}, ["unknown field", 'replica"']),
    "unknown field at the top": ({"spec.engine": {}}, ["unknown field", 'engine"']),
    "wrong case": ({"spec.decode.hostPoolGib": 1}, ["unknown field", 'hostPoolGib"']),
    "negative replicas": ({"spec.decode.replicas": -1}, ["spec.decode.replicas", "greater than or equal to 0"]),
    "too many replicas": ({"spec.decode.replicas": 1001}, ["spec.decode.replicas", "1000"]),
    "fractional replicas": ({"spec.decode.replicas": 1.5}, ["spec.decode.replicas", "integer"]),
    "replicas as text": ({"spec.decode.replicas": "1"}, ["spec.decode.replicas", "integer"]),
    "fractional pool": ({"spec.decode.hostPoolGiB": 0.5}, ["spec.decode.hostPoolGiB", "integer"]),
    "no pool": ({"spec.prefill.hostPoolGiB": 0}, ["spec.prefill.hostPoolGiB", "greater than or equal to 1"]),
    "negative pool": ({"spec.prefill.hostPoolGiB": -1}, ["spec.prefill.hostPoolGiB"]),
    "pool as quantity": ({"spec.prefill.hostPoolGiB": "1Gi"}, ["spec.prefill.hostPoolGiB", "integer"]),
    "no hosts": ({"spec.decode.hostsPerReplica": 0}, ["spec.decode.hostsPerReplica"]),
    "too many hosts": ({"spec.decode.hostsPerReplica": 65}, ["spec.decode.hostsPerReplica", "64"]),
    "no ranks": ({"spec.prefill.ranksPerHost": 0}, ["spec.prefill.ranksPerHost"]),
    "too many ranks": ({"spec.prefill.ranksPerHost": 65}, ["spec.prefill.ranksPerHost", "64"]),
    "none unavailable": ({"spec.rollout": {"maxUnavailable": 0}}, ["spec.rollout.maxUnavailable"]),
    "a long restart": ({"spec.restart": "x" * 254}, ["spec.restart"]),
    "no seats": ({"spec.decode.maxNumSeqs": 0}, ["spec.decode.maxNumSeqs"]),
    "too many seats": ({"spec.decode.maxNumSeqs": 4097}, ["spec.decode.maxNumSeqs", "4096"]),
    "too many routers": ({"spec.router.replicas": 101}, ["spec.router.replicas", "100"]),
    "no context": ({"spec.model.maxModelLen": 0}, ["spec.model.maxModelLen"]),
    "KV in a dtype of no engine": ({"spec.model.kvCacheDtype": "int4"}, ["spec.model.kvCacheDtype", "int4"]),
    "too long a context": ({"spec.model.maxModelLen": 1048577}, ["spec.model.maxModelLen", "1048576"]),
    "no weights": ({"spec.model.weightsGiB": 0}, ["spec.model.weightsGiB"]),
    "negative drain": ({"spec.drain.windowSeconds": -1}, ["spec.drain.windowSeconds"]),
    "endless drain": ({"spec.drain.windowSeconds": 86401}, ["spec.drain.windowSeconds", "86400"]),
    "an image with a space": ({"spec.image": "a b"}, ["spec.image"]),
    "an empty image": ({"spec.image": ""}, ["spec.image"]),
    "an empty model name": ({"spec.model.name": ""}, ["spec.model.name"]),
    "a model name with a space": ({"spec.model.name": "a b"}, ["spec.model.name"]),
    "devices that are no list": ({"spec.kvTransfer": {"netDevices": "mlx5_0 mlx5_1"}}, ["spec.kvTransfer.netDevices"]),
    "another transport": ({"spec.kvTransfer": {"backend": "mooncake"}}, ["spec.kvTransfer.backend", "nixl"]),
    "a store of no role": (
        {"spec.kvCacheOffload": {"roles": [], "storeGiB": 1}},
        ["spec.kvCacheOffload.roles", "at least 1"],
    ),
    "a store of decode": (
        {"spec.kvCacheOffload": {"roles": ["decode"], "storeGiB": 1}},
        ["spec.kvCacheOffload.roles", "needs prefill"],
    ),
    "a store of the router": (
        {"spec.kvCacheOffload": {"roles": ["prefill", "router"], "storeGiB": 1}},
        ["spec.kvCacheOffload.roles", "decode"],
    ),
    "a store of decode replicas of several hosts": (
        {"spec.kvCacheOffload": BOTH, "spec.decode.hostsPerReplica": 2},
        ["spec.kvCacheOffload", "needs decode.hostsPerReplica 1"],
    ),
    "a store of one role twice": (
        {"spec.kvCacheOffload": {"roles": ["prefill", "prefill"], "storeGiB": 1}},
        ["spec.kvCacheOffload.roles"],
    ),
    "a store without a size": ({"spec.kvCacheOffload": {"roles": ["prefill"]}}, ["spec.kvCacheOffload", "equired"]),
    "an empty store": ({"spec.kvCacheOffload": {**STORE, "storeGiB": 0}}, ["spec.kvCacheOffload.storeGiB"]),
    "a store for what is not shared": (
        {"spec.kvCacheOffload": STORE, "spec.prefill.prefixCache": False},
        ["spec.kvCacheOffload", "needs prefill.prefixCache"],
    ),
    "a store of replicas of several hosts": (
        {"spec.kvCacheOffload": STORE, "spec.prefill.hostsPerReplica": 2},
        ["spec.kvCacheOffload", "needs prefill.hostsPerReplica 1"],
    ),
    "text for an object": ({"spec.drain": "60"}, ["spec.drain", "string"]),
}


@pytest.mark.parametrize(("changes", "says"), REFUSED.values(), ids=list(REFUSED))
def test_refused_and_told_why(server: Server, changes: dict[str, Any], says: list[str]) -> None:
    taken, said = server(deployment(changes))
    assert not taken
    for part in says:
        assert part in said


@pytest.mark.parametrize("rule", ["unknown field", "neither preset nor path", "negative replicas"])
def test_kubectl_apply_refuses_the_same(kube: Kubectl, rule: str) -> None:
    changes, says = REFUSED[rule]
    done = kube.apply(deployment(changes), check=False, dry_run=True)
    assert done.returncode != 0
    # kubectl names the parent and the field apart.
    assert says[-1].rsplit(".", 1)[-1] in done.stderr


@pytest.mark.parametrize("name", ["a", "a-1", "n" * 40, "glm52"])
def test_names_taken(server: Server, name: str) -> None:
    taken, said = server(deployment({}, name))
    assert taken, said


NAMES_REFUSED = [
    pytest.param("n" * 41, "at most 40 characters", id="41"),
    pytest.param("n" * 63, "at most 40 characters", id="63"),
    pytest.param("n" * 253, "at most 40 characters", id="253"),
    pytest.param("5g", "DNS label that starts with a letter", id="digit first"),
    pytest.param("a.b.c", "no dots", id="dots"),
]


@pytest.mark.parametrize(("name", "says"), NAMES_REFUSED)
def test_names_refused(server: Server, name: str, says: str) -> None:
    taken, said = server(deployment({}, name))
    assert not taken
    assert "metadata.name" in said
    assert says in said


RULES = {
    "exactly one of model.preset": ("a checkpoint on a volume", "preset and path"),
    "model.path and model.volume belong together": ("a checkpoint on a volume", "path without volume"),
    "must be /models or a directory under it": ("the volume's root", "path beside"),
    "needs router.service.type NodePort": ("a node port", "node port on a ClusterIP"),
    "must be at most crashPolicy.backoffMaxSeconds": (
        "one back-off for all",
        "back-off that begins above its end",
    ),
    "kvCacheOffload needs prefill.prefixCache": ("a store, all said", "a store for what is not shared"),
    "kvCacheOffload needs prefill.hostsPerReplica 1": (
        "a store beside decode of several hosts",
        "a store of replicas of several hosts",
    ),
    "kvCacheOffload for decode needs decode.hostsPerReplica 1": (
        "a store of both roles",
        "a store of decode replicas of several hosts",
    ),
    "kvCacheOffload.roles needs prefill": ("a store of prefixes", "a store of decode"),
}
"""Part of a rule's message → what it takes, at its edge, and what it refuses."""


def test_every_rule_has_something_that_it_takes_and_something_that_it_refuses(server: Server) -> None:
    named = {str(each.values[1]) for each in NAMES_REFUSED}
    for message in _messages(crd()):
        found = [part for part in (*RULES, *named) if part in message]
        assert found, f"no test of the rule: {message}"
        if found[0] in named:
            continue
        taken, refused = RULES[found[0]]
        assert server(deployment(ACCEPTED[taken]))[0]
        _, said = server(deployment(REFUSED[refused][0]))
        # By this rule, and not by the form of a field.
        assert message in said


def _messages(node: Any) -> Iterator[str]:
    """Of all rules within a schema."""
    if isinstance(node, dict):
        for rule in node.get("x-kubernetes-validations", []):
            yield rule["message"]
        for each in node.values():
            yield from _messages(each)
    elif isinstance(node, list):
        for each in node:
            yield from _messages(each)


def test_a_longer_name_is_refused_for_one_reason_only(server: Server) -> None:
    _, said = server(deployment({}, "n" * 41))
    assert "DNS label" not in said


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_is_taken(kube: Kubectl, file: Path) -> None:
    done = kube("apply", "--dry-run=server", "-f", str(file), check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len([d for d in yaml.safe_load_all(file.read_text()) if d])


def test_defaults_are_filled_by_the_server(kube: Kubectl) -> None:
    done = kube.apply(deployment({}), dry_run=True)
    assert done.returncode == 0
    spec = yaml.safe_load(
        kube("create", "--dry-run=server", "-f", "-", "-o", "yaml", input=yaml.safe_dump(deployment({}))).stdout
    )["spec"]
    assert spec["decode"]["replicas"] == 1
    assert spec["router"]["service"]["type"] == "ClusterIP"
    assert spec["drain"]["windowSeconds"] == 60


def test_explain_knows_every_field(kube: Kubectl) -> None:
    said = kube("explain", "glm52deployments.spec.decode", "--api-version=glm52.dev/v1alpha1").stdout
    assert "KV pool of one rank in host memory" in said
    assert "Seats of one rank" in said
