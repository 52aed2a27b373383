"""The operator as a process: it starts, says so, and ends at once when told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.kube import until
from tests.operator.cluster.conftest import ROOT

pytestmark = pytest.mark.cluster


@dataclass
class Process:
    popen: subprocess.Popen[str]
    port: int

    def status(self, path: str) -> int | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def end(self) -> tuple[int, float]:
        began = time.monotonic()
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout=30), time.monotonic() - began


def start(kubeconfig: Path, *arguments: str) -> Process:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "glm52_operator", "run", "--health-host=127.0.0.1", f"--health-port={port}"]
    path = os.pathsep.join(str(ROOT / part) for part in ("operator", "engine"))
    env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": path}
    popen = subprocess.Popen(
        [*command, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return Process(popen, port)


@pytest.fixture
def running(cluster: Any, cluster_namespace: str) -> Iterator[Process]:
    """In a namespace without deployments: the cluster has an operator already, and this one must find nothing to do."""
    process = start(cluster.kubeconfig, "--namespace", cluster_namespace)
    until("it is ready", lambda: process.status("/readyz") == 200, timeout=60)
    yield process
    process.popen.kill()


def test_it_ends_well_and_soon_after_term(running: Process) -> None:
    assert running.status("/healthz") == 200
    code, seconds = running.end()
    assert code == 0
    assert seconds < 5


def test_a_second_term_changes_nothing(running: Process) -> None:
    running.popen.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0


def test_without_an_api_server_it_is_alive_says_so_and_can_be_ended(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "users: [{name: u, user: {}}]\ncontexts: [{name: x, context: {cluster: c, user: u}}]\n"
    )
    process = start(kubeconfig)
    try:
        until("it is alive", lambda: process.status("/healthz") == 200, timeout=60)
        assert process.status("/readyz") == 503
        code, seconds = process.end()
        assert code == 0
        assert seconds < 5
        assert process.popen.stdout is not None
        assert "127.0.0.1:1" in process.popen.stdout.read()
    finally:
        process.popen.kill()
