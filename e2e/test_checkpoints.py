"""A checkpoint that cannot be served: pod and condition name the file and the tensor, and nothing loops hot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster import Cluster
from e2e.kube import Kubectl, Object, condition, until
from e2e.manifests import deployment

pytestmark = pytest.mark.cluster

FOLDER = "/var/lib/glm52-test-checkpoints"

BREAK = """
import os, pathlib, shutil
from safetensors.torch import load_file, save_file
from glm52_engine.checkpoint.make import make_checkpoint

def broken(case, change):
    out = pathlib.Path("/out") / case
    shutil.rmtree(out, ignore_errors=True)  # of an earlier run on this cluster
    make_checkpoint("tiny", out)
    file = next(out.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return file

norm = "model.layers.1.input_layernorm.weight"
broken("missing", lambda t: t.pop(norm))
broken("extra", lambda t: t.update({"model.layers.1.surprise.weight": t[norm].clone()}))
broken("shape", lambda t: t.update({norm: t[norm][:-1].clone()}))
file = broken("unreadable", lambda t: None)
os.truncate(file, os.path.getsize(file) // 2)
os.system("chmod -R a+rX /out")
print("ok")
"""

CASES = {
    "missing": "model.layers.1.input_layernorm.weight",
    "extra": "model.layers.1.surprise.weight",
    "shape": "model.layers.1.input_layernorm.weight",
    "unreadable": "safetensors",
}


def workers(kubectl: Kubectl) -> list[str]:
    return [n["metadata"]["name"] for n in kubectl.list("nodes", "!node-role.kubernetes.io/control-plane")]


def breaker(node: str, image: str) -> Object:
    """A pod that writes the broken checkpoints into a folder of its node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"breaker-{node}"},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "breaker",
                    "image": image,
                    "command": ["python3", "-c", BREAK],
                    "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
                    "volumeMounts": [{"name": "out", "mountPath": "/out"}],
                }
            ],
            "volumes": [{"name": "out", "hostPath": {"path": FOLDER, "type": "DirectoryOrCreate"}}],
        },
    }


@pytest.fixture(scope="module")
def broken(kube: Kubectl, cluster: Cluster) -> Kubectl:
    nodes = workers(kube)
    kube.apply(*(breaker(node, cluster.images["engine"]) for node in nodes))
    for node in nodes:
        kube("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/breaker-{node}", "--timeout=120s", timeout=150)
    return kube


@pytest.fixture
def deployed(broken: Kubectl, case: str) -> Iterator[Kubectl]:
    """The deployment of one case; one at a time, or they would fill the nodes."""
    volume = {"hostPath": {"path": FOLDER}}
    model = {"path": f"/models/{case}", "volume": volume, "maxModelLen": 2048}
    broken.apply(deployment(case, model=model, decode={"replicas": 0}))
    yield broken
    broken("delete", "glm52", case)


@pytest.mark.parametrize(("case", "said"), CASES.items())
def test_the_condition_names_what_is_wrong(deployed: Kubectl, case: str, said: str) -> None:
    def refused() -> bool:
        return condition(deployed.get("glm52", case), "PrefillReady").get("reason") == "ConfigRefused"

    until(
        "PrefillReady says ConfigRefused",
        refused,
        timeout=150,
        last=lambda: (deployed.get("glm52", case) or {}).get("status"),
    )
    found = deployed.get("glm52", case)
    message = condition(found, "PrefillReady")["message"]
    assert said in message
    assert f"/models/{case}" in message
    ready = condition(found, "Ready")
    assert ready["status"] == "False"
    assert said in ready["message"]
    pod = deployed.get("pod", f"{case}-prefill-0")
    assert pod is not None
    # The kubelet's back-off is 10 s, 20 s, 40 s, …: more restarts than this would be a hot loop.
    assert pod["status"]["containerStatuses"][0]["restartCount"] <= 5
