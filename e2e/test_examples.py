"""Every file in examples/ is applied, and becomes what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from e2e.kube import Kubectl, condition, until, wait_ready

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).parent.parent / "examples"
ELSEWHERE = {"hisparse-and-store.yaml"}
"""Applied by the test of what it shows."""

FILES = sorted(file for file in EXAMPLES.glob("*.yaml") if file.name not in ELSEWHERE)
NEEDS_A_CHECKPOINT = {"checkpoint-on-pvc.yaml"}
NEEDS_GPUS = {"gpus.yaml"}


def test_there_are_examples() -> None:
    assert {"tiny.yaml", "two-ranks.yaml", *NEEDS_A_CHECKPOINT, *NEEDS_GPUS} <= {f.name for f in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_an_example_applies(kubectl: Kubectl, file: Path) -> None:
    # In the namespace a reader would use: examples/tiny.yaml may already run there, on the one node port it names.
    kube = kubectl.within("default")
    name = next(o["metadata"]["name"] for o in yaml.safe_load_all(file.read_text()) if o["kind"] == "GLM52Deployment")
    was_there = kube.get("glm52", name) is not None
    kube("apply", "-f", str(file))
    try:
        if file.name in NEEDS_A_CHECKPOINT:
            # The claim is empty here: the condition has to say which file is missing, and where.
            until(
                "the missing checkpoint is named",
                lambda: "/models/glm-5.2/" in condition(kube.get("glm52", name), "PrefillReady").get("message", ""),
                timeout=150,
                last=lambda: (kube.get("glm52", name) or {}).get("status"),
            )
        elif file.name in NEEDS_GPUS:
            until(
                "the missing GPUs are named",
                lambda: "nvidia.com/gpu" in condition(kube.get("glm52", name), "Schedulable").get("message", ""),
                timeout=60,
                last=lambda: (kube.get("glm52", name) or {}).get("status"),
            )
        else:
            wait_ready(kube, name)
    finally:
        if not was_there:
            kube("delete", "-f", str(file), "--wait=false")
