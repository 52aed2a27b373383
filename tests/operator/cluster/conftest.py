"""These tests run on the cluster of `make up`, or on the one that KUBECONFIG_GLM52 names and whose operator runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes.config import new_client_from_config

from e2e.kube import Object

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class GivenCluster:
    kubectl: Path
    kubeconfig: Path
    helm: Path


@pytest.fixture(scope="session")
def cluster() -> Any:
    given = os.environ.get("KUBECONFIG_GLM52")
    if given is None:
        from e2e.cluster import attach

        return attach()
    return GivenCluster(_program("kubectl"), Path(given), _program("helm"))


def _program(name: str) -> Path:
    found = os.environ.get(f"{name.upper()}_GLM52") or shutil.which(name)
    assert found is not None, f"KUBECONFIG_GLM52 is set, but there is no {name} on the PATH"
    return Path(found)


Server = Callable[[Object], tuple[bool, str]]


@pytest.fixture(scope="module")
def server(cluster: Any, cluster_namespace: str) -> Server:
    """Ask the API server about an object, writing nothing: whether it takes it, and what it says.

    As strict as kubectl asks it to be, but without a process per question.
    """
    client = new_client_from_config(str(cluster.kubeconfig))  # type: ignore[no-untyped-call]
    path = f"/apis/glm52.dev/v1alpha1/namespaces/{cluster_namespace}/glm52deployments"
    query = [("dryRun", "All"), ("fieldValidation", "Strict")]

    def ask(obj: Object) -> tuple[bool, str]:
        request = client.param_serialize("POST", path, query_params=query, body=obj, auth_settings=["BearerToken"])
        response = client.call_api(*request)
        response.read()
        return response.status == 201, str(json.loads(response.data).get("message"))

    return ask
