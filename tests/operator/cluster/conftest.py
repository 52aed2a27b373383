"""These tests run on the cluster of `make up`, or on the one that KUBECONFIG_GLM52 names and whose operator runs."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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
