"""The chart: what it renders, what it refuses, and that its permissions are what the operator needs, and no more."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from e2e.kube import Kubectl
from glm52_operator.api.crd import crd
from glm52_operator.reconcile.kinds import LEASE, NODE
from tests.operator.cluster.conftest import ROOT

pytestmark = pytest.mark.cluster

CHART = ROOT / "charts" / "glm52-operator"
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def helm(cluster: Any) -> Helm:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(cluster.helm), *arguments], capture_output=True, text=True, timeout=60, check=False)

    return run


def render(helm: Helm, *values: str, namespace: str = "sys") -> list[dict[str, Any]]:
    sets = [part for value in values for part in ("--set", value)]
    done = helm("template", "glm52-operator", str(CHART), "--namespace", namespace, *sets)
    assert done.returncode == 0, done.stderr
    return [obj for obj in yaml.safe_load_all(done.stdout) if obj]


def of(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [obj for obj in objects if obj["kind"] == kind]


def test_lint_is_clean(helm: Helm) -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize(
    "values",
    [
        pytest.param((), id="defaults"),
        pytest.param(("rbac.clusterWide=false",), id="one namespace"),
        pytest.param(("rbac.clusterWide=false", "watchNamespaces={default,kube-public}"), id="two namespaces"),
    ],
)
def test_the_api_server_takes_every_object(helm: Helm, kubectl: Kubectl, values: tuple[str, ...]) -> None:
    objects = render(helm, "crd.install=false", *values, namespace="default")
    done = kubectl.apply(*objects, dry_run=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_crd_comes_along_and_stays_behind(helm: Helm) -> None:
    (installed,) = of(render(helm), "CustomResourceDefinition")
    assert installed["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    installed["metadata"].pop("labels")
    assert installed == crd()
    assert not of(render(helm, "crd.install=false"), "CustomResourceDefinition")


def test_a_namespaced_install_asks_for_nothing_of_the_cluster(helm: Helm) -> None:
    objects = render(helm, "rbac.clusterWide=false", "crd.install=false", "watchNamespaces={a,b}")
    assert {obj["kind"] for obj in objects} == {"ServiceAccount", "Role", "RoleBinding", "Deployment"}
    assert [obj["metadata"]["namespace"] for obj in of(objects, "Role")] == ["sys", "a", "b"]
    assert not [rule for obj in of(objects, "Role") for rule in obj["rules"] if NODE.plural in rule["resources"]]
    (deployment,) = of(objects, "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=a", "--namespace=b"} <= set(arguments)


@pytest.mark.parametrize("wide", ["true", "false"])
def test_the_lease_is_the_only_thing_that_the_operator_may_touch_where_it_lies(helm: Helm, wide: str) -> None:
    objects = render(helm, f"rbac.clusterWide={wide}", "watchNamespaces={a}")
    (role,) = (obj for obj in of(objects, "Role") if obj["metadata"]["namespace"] == "sys")
    create, rest = role["rules"]
    assert {"apiGroups": [LEASE.group], "resources": [LEASE.plural], "verbs": ["create"]} == create
    assert set(rest["verbs"]) == {"get", "watch", "update"}
    (deployment,) = of(objects, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"--lease=sys/{rest['resourceNames'][0]}" in container["args"]
    # A pod that restarts is known again; another pod is not.
    assert {"name": "GLM52_IDENTITY", "value": "$(POD_NAME)_$(POD_UID)"} in container["env"]


def test_the_values_of_the_installer(helm: Helm) -> None:
    (deployment,) = of(render(helm, "image.repository=r/op", "image.tag=7", "engineImage=r/engine:7"), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "r/op:7"
    assert "--engine-image=r/engine:7" in container["args"]
    assert container["args"][0] == "run"


def test_prometheus_finds_the_operators_metrics(helm: Helm) -> None:
    (deployment,) = of(render(helm), "Deployment")
    template = deployment["spec"]["template"]
    (port,) = template["spec"]["containers"][0]["ports"]
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port["containerPort"]),
        "prometheus.io/path": "/metrics",
    }


def test_the_operators_pod_is_hardened(helm: Helm) -> None:
    (deployment,) = of(render(helm), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("engineimage=x", "additional properties 'engineimage' not allowed"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("replicas=-1", "/replicas"),
        ("watchNamespaces={A}", "/watchNamespaces/0"),
        ("rbac.clusterWide=maybe", "/rbac/clusterWide"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, value: str, says: str) -> None:
    done = helm("template", "x", str(CHART), "--set", value)
    assert done.returncode != 0
    assert says in done.stderr
