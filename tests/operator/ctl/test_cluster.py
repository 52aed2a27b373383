"""The tool against an API server over HTTP: a stand-in that keeps objects in a dict and refuses every real write."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from glm52_operator import names
from glm52_operator.ctl.main import main
from glm52_operator.desired.children import build
from glm52_operator.desired.target import Object
from glm52_operator.plan.changes import stamp
from glm52_operator.reconcile.kinds import BY_KIND
from tests.operator.builders import pod, resource, target
from tests.operator.ctl.objects import SERVING, ready_pod, waiting

LIVE_IMAGE = "engine:test"


@dataclass
class Cluster:
    """Objects by their path; `refuse` maps a path to a status and a message."""

    objects: dict[str, Object] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    nonsense: str | None = None
    kubeconfig: str = ""
    dry_runs: list[str] = field(default_factory=list)

    def put(self, obj: Object) -> Object:
        obj = copy.deepcopy(obj)
        kind = BY_KIND[obj["kind"]]
        self.objects[kind.path("ns", obj["metadata"]["name"])] = obj
        return obj

    async def handle(self, request: web.Request) -> web.Response:
        if self.nonsense is not None:
            return web.Response(text=self.nonsense)
        refused = self.refuse.get(request.path)
        if refused is not None:
            return web.json_response({"message": refused[1]}, status=refused[0])
        if request.method == "PATCH":
            assert request.query["dryRun"] == "All"
            self.dry_runs.append(request.path)
            body = json.loads(await request.read())
            # What server-side apply leaves: the new intent, and the defaults that the server put in.
            defaults = {"managedFields": [{"manager": "x"}], "resourceVersion": "99"}
            body["metadata"] = {**self.objects[request.path]["metadata"], **body["metadata"], **defaults}
            return web.json_response(body)
        assert request.method == "GET"
        if request.path in self.objects:
            return web.json_response(self.objects[request.path])
        items = [obj for path, obj in self.objects.items() if path.rsplit("/", 1)[0] == request.path]
        if items or request.path.rsplit("/", 1)[1] in {kind.plural for kind in BY_KIND.values()}:
            return web.json_response({"items": items, "metadata": {}})
        return web.json_response({"message": "not found"}, status=404)


def kubeconfig(server: str) -> str:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
    }
    return yaml.safe_dump(config)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    found = Cluster()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.handle)
    async with TestServer(app) as server:
        (tmp_path / "kubeconfig").write_text(kubeconfig(str(server.make_url(""))))
        found.kubeconfig = str(tmp_path / "kubeconfig")
        yield found


@pytest.fixture
def tool(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Any:
    async def run(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, [*arguments, "--kubeconfig", cluster.kubeconfig])
        return code, *capsys.readouterr()

    return run


def serving(cluster: Cluster, **spec: Any) -> None:
    """A deployment as an operator leaves it that was installed with LIVE_IMAGE."""
    status = {"observedGeneration": 1, "conditions": SERVING}
    cluster.put({**resource(**spec), "status": status})
    counts = {"observedGeneration": 1, "replicas": 1, "readyReplicas": 1, "updatedReplicas": 1}
    for child in map(stamp, build(target(**{"image": LIVE_IMAGE, **spec}))):
        child["metadata"] |= {"generation": 1, "uid": f"uid-{child['metadata']['name']}"}
        if child["kind"] in ("StatefulSet", "Deployment"):
            child["status"] = {**counts, "currentRevision": "r1", "updateRevision": "r1"}
        cluster.put(child)
    for component in ("prefill", "decode", "router"):
        cluster.put({"apiVersion": "v1", "kind": "Pod", **ready_pod(component)})


def write(tmp_path: Path, **spec: Any) -> str:
    obj = resource(**spec)
    obj["metadata"] = {"name": "chat"}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(obj))
    return str(tmp_path / "x.yaml")


async def test_a_deployment_that_serves_is_ready(cluster: Cluster, tool: Any) -> None:
    serving(cluster)
    assert await tool("diagnose", "chat") == (0, "GLM52Deployment chat in namespace ns is Ready.\n", "")
    code, out, _ = await tool("status", "chat", "-n", "ns")
    assert code == 0
    assert "ns/chat" in out
    assert "chat-decode-0" in out


async def test_a_broken_pod_is_diagnosed_and_the_exit_code_says_so(cluster: Cluster, tool: Any) -> None:
    serving(cluster)
    broken = pod("chat-decode-0", containerStatuses=[waiting("ErrImagePull")])
    cluster.put({"apiVersion": "v1", "kind": "Pod", **broken})
    code, out, _ = await tool("diagnose", "chat")
    assert code == 1
    assert "1. decode: ImagePullBackOff" in out


async def test_a_name_that_is_not_there_is_told_with_those_that_are(cluster: Cluster, tool: Any) -> None:
    serving(cluster)
    code, _, err = await tool("diagnose", "caht")
    assert (code, err) == (1, "glm52ctl: there is no GLM52Deployment caht in namespace ns; there are: chat\n")


async def test_a_cluster_without_the_crd_is_told(cluster: Cluster, tool: Any) -> None:
    cluster.refuse[BY_KIND[names.KIND].path("ns")] = (404, "the server could not find the requested resource")
    code, _, err = await tool("status", "chat")
    assert code == 1
    assert f"does not know {names.CRD_NAME}: install" in err


async def test_a_missing_permission_names_verb_and_resource(cluster: Cluster, tool: Any) -> None:
    serving(cluster)
    cluster.refuse["/api/v1/namespaces/ns/pods"] = (403, "pods is forbidden")
    code, _, err = await tool("status", "chat")
    assert code == 2
    assert "verb 'list' on 'pods'" in err


@pytest.mark.parametrize("answer", ["<html>log in</html>", "{}", "[]", "3"])
async def test_a_server_that_is_no_kubernetes_is_told(cluster: Cluster, tool: Any, answer: str) -> None:
    cluster.nonsense = answer
    for command in ("status", "diagnose"):
        code, out, err = await tool(command, "chat")
        assert (code, out) == (2, "")
        assert "does not answer as the Kubernetes API does" in err


async def test_a_login_that_has_expired_is_told(cluster: Cluster, tool: Any) -> None:
    cluster.refuse[BY_KIND[names.KIND].path("ns", "chat")] = (401, "Unauthorized")
    code, _, err = await tool("status", "chat")
    assert code == 2
    assert "log in again" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(None, "kubeconfig cannot be used", id="missing"),
        pytest.param("", "kubeconfig cannot be used", id="empty"),
        pytest.param("a: [", "kubeconfig cannot be used", id="bad YAML"),
        pytest.param("contexts: 3\ncurrent-context: x\n", "kubeconfig cannot be used", id="nonsense"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_told(
    text: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "k"
    if text is not None:
        file.write_text(text)
    assert main(["status", "chat", "--kubeconfig", str(file)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Set $KUBECONFIG" in err


async def test_an_unknown_context_is_told_with_those_that_are_there(cluster: Cluster, tool: Any) -> None:
    code, _, err = await tool("status", "chat", "--context", "there")
    assert (code, err) == (2, "glm52ctl: --context there: is not in the kubeconfig; there are: here\n")


def test_a_cluster_that_does_not_answer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "k"
    file.write_text(kubeconfig("http://127.0.0.1:1"))
    assert main(["diagnose", "chat", "--kubeconfig", str(file)]) == 2
    assert "the cluster does not answer" in capsys.readouterr().err


async def test_an_unchanged_file_changes_nothing(cluster: Cluster, tool: Any, tmp_path: Path) -> None:
    serving(cluster)
    code, out, _ = await tool("plan", "--diff", "-f", write(tmp_path))
    assert (code, out) == (0, "GLM52Deployment chat in namespace ns\nNothing would change.\n")
    assert len(cluster.dry_runs) == len(build(target()))


async def test_a_new_deployment_is_new_with_all_its_children(cluster: Cluster, tool: Any, tmp_path: Path) -> None:
    _, out, _ = await tool("plan", "--diff", "-f", write(tmp_path))
    lines = out.splitlines()
    assert lines[1] == "+ GLM52Deployment chat"
    assert len(lines) == 2 + len(build(target()))
    assert all(line.startswith("+ ") for line in lines[1:])


async def test_only_changed_fields_are_shown_and_what_rolls(cluster: Cluster, tool: Any, tmp_path: Path) -> None:
    serving(cluster, image="engine:old", decode={"replicas": 2})
    spec: dict[str, Any] = {"image": "engine:new", "decode": {"replicas": 3}}
    _, out, _ = await tool("plan", "--diff", "-f", write(tmp_path, **spec))
    assert out.splitlines()[1:] == [
        "~ GLM52Deployment chat",
        "    spec.image: engine:old → engine:new",
        "    spec.decode.replicas: 2 → 3",
        "~ StatefulSet chat-prefill  (its pods are replaced)",
        "    spec.template.spec.containers[engine].image: engine:old → engine:new",
        "    spec.template.spec.initContainers[make-checkpoint].image: engine:old → engine:new",
        "~ StatefulSet chat-decode  (its pods are replaced)",
        "    spec.replicas: 2 → 3",
        "    spec.template.spec.containers[engine].image: engine:old → engine:new",
        "    spec.template.spec.initContainers[make-checkpoint].image: engine:old → engine:new",
        "~ Deployment chat-router  (its pods are replaced)",
        "    spec.template.spec.containers[router].image: engine:old → engine:new",
    ]


async def test_what_somebody_scaled_stays_where_the_file_is_silent(cluster: Cluster, tool: Any, tmp_path: Path) -> None:
    serving(cluster, decode={"replicas": 5})
    _, out, _ = await tool("plan", "--diff", "-f", write(tmp_path))
    assert "Nothing would change." in out


async def test_a_child_that_is_no_longer_wanted_goes_and_an_orphan_stays(
    cluster: Cluster, tool: Any, tmp_path: Path
) -> None:
    serving(cluster)
    child = next(c for c in build(target()) if c["kind"] == "Service")
    cluster.put({**child, "metadata": {**child["metadata"], "name": "chat-old"}})
    cluster.put({**child, "metadata": {**child["metadata"], "name": "chat-orphan", "ownerReferences": []}})
    _, out, _ = await tool("plan", "--diff", "-f", write(tmp_path))
    assert out.splitlines()[1:] == ["- Service chat-old"]


async def test_a_child_of_somebody_else_is_named(cluster: Cluster, tool: Any, tmp_path: Path) -> None:
    serving(cluster)
    cluster.put({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat-router", "namespace": "ns"}})
    _, out, _ = await tool("plan", "--diff", "-f", write(tmp_path))
    assert "~ Service chat-router" in out
    assert "belongs to somebody else" in out


async def test_a_merge_that_the_api_server_would_refuse_is_refused(cluster: Cluster, tool: Any, tmp_path: Path) -> None:
    serving(cluster)
    obj = resource(model={"path": "/models/x", "volume": {"emptyDir": {}}})
    obj["metadata"] = {"name": "chat"}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(obj))
    code, _, err = await tool("plan", "--diff", "-f", str(tmp_path / "x.yaml"))
    assert code == 1
    assert "together with what the cluster has" in err
    assert "exactly one of model.preset" in err
