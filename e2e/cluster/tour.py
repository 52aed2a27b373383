"""The operator's chart, the example, and one chat: what a newcomer sees."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

from e2e.cluster.errors import Failed
from e2e.cluster.lifecycle import Cluster
from e2e.cluster.paths import REPO
from e2e.cluster.progress import Progress
from e2e.cluster.shell import run

RELEASE, NAMESPACE = "glm52-operator", "glm52-system"
CHART = REPO / "charts" / RELEASE
EXAMPLE = REPO / "examples" / "tiny.yaml"
READY_SECONDS = 300
URL = "http://127.0.0.1:30080"
SERVICE = "service/tiny-router"
QUESTION = "How do I scale tiny to 2 decode pods?"
"""The example serves a model that was trained on such questions."""


def kubectl(cluster: Cluster, *arguments: str, timeout: float = 60) -> str:
    return run([cluster.kubectl, "--kubeconfig", cluster.kubeconfig, *arguments], timeout=timeout)


def helm(cluster: Cluster, *arguments: str, timeout: float = 300) -> str:
    return run([cluster.helm, "--kubeconfig", cluster.kubeconfig, *arguments], timeout=timeout)


def chart_values(images: dict[str, str]) -> list[str]:
    """The chart's values for these images, as helm arguments."""
    repository, _, tag = images["operator"].rpartition(":")
    values = {
        "image.repository": repository,
        "image.tag": tag,
        "image.pullPolicy": "IfNotPresent",
        "engineImage": images["engine"],
    }
    return [argument for name, value in values.items() for argument in ("--set-string", f"{name}={value}")]


def install_operator(cluster: Cluster, progress: Progress) -> None:
    values = chart_values(cluster.images)
    with progress.phase("operator"):
        _settle_release(cluster)
        try:
            helm(cluster, "upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace",
                 "--wait", "--timeout", "120s", *values)  # fmt: skip
        except Failed as error:
            raise Failed(f"{error}\n{_operator_says(cluster)}") from error


def _settle_release(cluster: Cluster) -> None:
    """Helm refuses to touch a release whose last change was killed half-way, for ever."""
    try:
        status = str(
            json.loads(helm(cluster, "status", RELEASE, "--namespace", NAMESPACE, "-o", "json"))["info"]["status"]
        )
    except Failed:
        return  # not installed
    if status == "pending-install":
        helm(cluster, "uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")
    elif status.startswith("pending-"):
        helm(cluster, "rollback", RELEASE, "--namespace", NAMESPACE, "--wait")


def _operator_says(cluster: Cluster) -> str:
    shown = [("get", "pods", "-o", "wide"), ("logs", f"deployment/{RELEASE}", "--tail=15", "--all-containers")]
    return "\n".join(_try(cluster, *command, f"--namespace={NAMESPACE}") for command in shown)


def _try(cluster: Cluster, *command: str) -> str:
    try:
        return kubectl(cluster, *command)
    except Failed as error:
        return str(error)


def uninstall(cluster: Cluster, progress: Progress) -> None:
    """Remove what the tour put into a cluster of the user's own, and nothing else."""
    with progress.phase("example and operator removed"):
        kubectl(cluster, "delete", "-f", str(EXAMPLE), "--ignore-not-found", "--timeout=120s", timeout=150)
        helm(cluster, "uninstall", RELEASE, "--namespace", NAMESPACE, "--ignore-not-found", "--wait")
        kubectl(cluster, "delete", "namespace", NAMESPACE, "--ignore-not-found", timeout=150)


def run_example(cluster: Cluster, progress: Progress) -> None:
    kubectl(cluster, "apply", "-f", str(EXAMPLE))
    with progress.phase("examples/tiny.yaml Ready"):
        try:
            kubectl(
                cluster,
                "wait",
                "--for=condition=Ready",
                "glm52/tiny",
                f"--timeout={READY_SECONDS}s",
                timeout=READY_SECONDS + 30,
            )
        except Failed as error:
            raise Failed(f"{error}\n{kubectl(cluster, 'get', 'glm52,pods', '-o', 'wide')}") from error
    model = kubectl(cluster, "get", "glm52", "tiny", "-o", "jsonpath={.spec.model.name}")
    with progress.phase("a chat through the router"):
        if cluster.mode == "kind":
            wait_for_router(URL)
            chat(URL, model)
        else:  # of a cluster of the user's own it is not known how its nodes are reached
            with forwarded(cluster) as url:
                chat(url, model)
    print(next_steps(cluster, model))


@contextlib.contextmanager
def forwarded(cluster: Cluster) -> Iterator[str]:
    """The router on a free port of this machine, through the API server."""
    command: list[str | Path] = [cluster.kubectl, "--kubeconfig", cluster.kubeconfig, "port-forward", SERVICE, ":8000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)", said)
        if found is None:
            raise Failed(f"kubectl port-forward {SERVICE}: {said.strip() or 'ended without a word'}")
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.terminate()
        process.wait()


def chat(url: str, model: str) -> None:
    """One question, its answer printed token by token."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 200,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    print(f"\n> {QUESTION}\n", flush=True)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            for piece in pieces(response):
                print(piece, end="", flush=True)
    except urllib.error.HTTPError as error:
        raise Failed(f"the router answered {error.code}: {error.read().decode(errors='replace')[:500]}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"the answer of the router broke off: {error}") from error
    print("\n", flush=True)


def wait_for_router(url: str, patience: float = 30) -> None:
    """Ready says that the pods serve; kube-proxy on the node we enter by may be a moment behind."""
    deadline = time.monotonic() + patience
    while True:
        try:
            urllib.request.urlopen(f"{url}/v1/models", timeout=10).close()
            return
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > deadline:
                raise Failed(f"the router does not answer on {url}: {error}") from error
            time.sleep(0.3)


def pieces(lines: Iterable[bytes]) -> Iterator[str]:
    """The text in a stream of server-sent events, the reasoning on lines of its own; an error in it is raised."""
    reasoned = False
    for line in lines:
        data = line.decode().strip()
        if not data.startswith("data:") or data.endswith("[DONE]"):
            continue
        event = json.loads(data.removeprefix("data:"))
        if "error" in event:
            raise Failed(f"the stream ended with an error: {event['error']}")
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            thought, said = delta.get("reasoning_content") or "", delta.get("content") or ""
            reasoned = reasoned or bool(thought)
            if said and reasoned:
                thought, reasoned = thought + "\n", False
            yield thought + said


def next_steps(cluster: Cluster, model: str) -> str:
    on_path = shutil.which("kubectl") == str(cluster.kubectl)
    name = "kubectl" if on_path else str(cluster.kubectl)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "What is HiSparse?"}]})
    url, way = URL, ""
    if cluster.mode != "kind":
        url, way = "http://127.0.0.1:8000", f"  {name} port-forward {SERVICE} 8000 &\n"
    return f"""The API is at {url}/v1. Next:

  export KUBECONFIG={cluster.kubeconfig}
{way}  {name} get glm52 -w
  {name} scale glm52 tiny --replicas=2
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'
"""
