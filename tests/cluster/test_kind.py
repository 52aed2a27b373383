"""What kind, containerd and dockerd are told, and that old kernels' crutches fall away on new ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from e2e.cluster import daemon, kind, nodeimage, tour
from e2e.cluster.errors import Failed
from e2e.cluster.lifecycle import Cluster
from e2e.cluster.machine import Facts, Way
from e2e.cluster.network import Addresses
from e2e.cluster.paths import Paths
from e2e.cluster.progress import Progress
from e2e.cluster.shell import follow, stop_running, together

MODERN = Facts(
    system="Linux", machine="x86_64", root=True, docker_answers=False, dockerd=True, apt=True,
    foreign_docker=False, sys_resource=True, cgroup_v2=True,
)  # fmt: skip
BOUND = replace(MODERN, sys_resource=False, cgroup_v2=False)
ADDRESSES = Addresses("10.248.0.0/14")
PATHS = Paths(Path("/c"))


def test_three_nodes_reachable_from_this_machine_only() -> None:
    config = kind.configuration(ADDRESSES, MODERN, Way("private", "built"), PATHS)
    assert [node["role"] for node in config["nodes"]] == ["control-plane", "worker", "worker"]
    assert config["networking"]["apiServerAddress"] == "127.0.0.1"
    ports = config["nodes"][0]["extraPortMappings"]
    assert {port["listenAddress"] for port in ports} == {"127.0.0.1"}
    assert [port["hostPort"] for port in ports] == [30080, 30081, 30082, 30083]


def test_every_built_node_sees_the_store_and_cannot_write_it() -> None:
    config = kind.configuration(ADDRESSES, MODERN, Way("private", "built"), PATHS)
    for node in config["nodes"]:
        assert node["extraMounts"] == [{"hostPath": "/c/store", "containerPath": "/kind/store", "readOnly": True}]


def test_a_published_node_image_is_left_as_it_is() -> None:
    config = kind.configuration(ADDRESSES, MODERN, Way("yours", "published"), PATHS)
    assert config["kubeadmConfigPatches"] == []
    assert "extraMounts" not in config["nodes"][1]


def test_cgroup_v1_is_allowed_only_where_there_is_nothing_else() -> None:
    patches = kind.configuration(ADDRESSES, BOUND, Way("private", "built"), PATHS)["kubeadmConfigPatches"]
    assert {"kind": "KubeletConfiguration", "failCgroupV1": False} in [yaml.safe_load(patch) for patch in patches]
    assert "--fail-cgroupv1=false" in nodeimage.kubelet_arguments(BOUND)
    modern = kind.configuration(ADDRESSES, MODERN, Way("private", "built"), PATHS)["kubeadmConfigPatches"]
    assert not any("failCgroupV1" in patch for patch in modern)
    assert "cgroupv1" not in nodeimage.kubelet_arguments(MODERN)


def test_the_softened_runtime_stands_in_only_where_the_capability_is_missing() -> None:
    assert daemon.configuration(PATHS, ADDRESSES, BOUND)["default-runtime"] == "softened"
    assert "default-runtime" not in daemon.configuration(PATHS, ADDRESSES, MODERN)
    assert "restrict_oom_score_adj = true" in nodeimage.containerd_config(BOUND)
    assert "restrict_oom_score_adj = false" in nodeimage.containerd_config(MODERN)


def test_the_private_daemon_shares_nothing_with_another() -> None:
    config = daemon.configuration(PATHS, ADDRESSES, MODERN)
    for place in ("data-root", "exec-root", "pidfile"):
        assert config[place].startswith("/c/state/docker/")
    assert config["hosts"] == ["unix:///c/state/docker/docker.sock"]
    assert (config["bridge"], config["cgroup-parent"]) == ("glm52-docker0", "/glm52")


def test_the_chart_is_given_the_images_by_name_and_tag() -> None:
    values = tour.chart_values({"operator": "localhost:5000/glm52-operator:0.1.0-ab", "engine": "localhost/e:1"})
    assert values[1::2] == [
        "image.repository=localhost:5000/glm52-operator",
        "image.tag=0.1.0-ab",
        "image.pullPolicy=IfNotPresent",
        "engineImage=localhost/e:1",
    ]


def test_streamed_pieces() -> None:
    lines = [
        b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n', b"\n", b": ping\n",
        b'data: {"choices": [{"delta": {"reasoning_content": "A "}}]}\n',
        b'data: {"choices": [{"delta": {"reasoning_content": "greeting."}}]}\n',
        b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n', b'data: {"choices": [{"delta": {"content": "!"}}]}\n',
        b'data: {"choices": [], "usage": {}}\n',
        b"data: [DONE]\n",
    ]  # fmt: skip
    assert "".join(tour.pieces(lines)) == "A greeting.\nHi!"
    with pytest.raises(Failed, match="out of memory"):
        list(tour.pieces([b'data: {"error": {"message": "out of memory"}}']))


def test_the_tour_asks_the_example() -> None:
    example = yaml.safe_load(tour.EXAMPLE.read_text())
    assert example["metadata"]["name"] == "tiny"
    assert example["spec"]["model"]["preset"] == "demo", "it alone has a sensible answer"
    assert tour.URL.endswith(f":{example['spec']['router']['service']['nodePort']}")


@pytest.mark.parametrize(
    ("mode", "url"), [("kind", "http://127.0.0.1:30080/v1"), ("kubeconfig", "http://127.0.0.1:8000/v1")]
)
def test_next_steps_can_be_copied_as_they_are(mode: str, url: str) -> None:
    cluster = Cluster(Path("/k/config"), Path("/k/kubectl"), Path("/k/helm"), {}, mode=mode)
    text = tour.next_steps(cluster, "glm-5.2")
    for line in (
        "export KUBECONFIG=/k/config",
        "/k/kubectl get glm52 -w",
        "/k/kubectl scale glm52 tiny --replicas=2",
        f"curl {url}/chat/completions",
        '"model": "glm-5.2"',
    ):
        assert line in text
    assert ("/k/kubectl port-forward service/tiny-router 8000 &" in text) is (mode == "kubeconfig")


def _kubectl_that_says(folder: Path, words: str) -> Cluster:
    program = folder / "kubectl"
    program.write_text(f"#!/bin/sh\necho '{words}'\nexec sleep 60\n")
    program.chmod(0o755)
    return Cluster(Path("/k/config"), program, Path("/k/helm"), {}, mode="kubeconfig")


def test_the_router_of_a_cluster_of_one_s_own_is_reached_through_a_forwarded_port(tmp_path: Path) -> None:
    with tour.forwarded(_kubectl_that_says(tmp_path, "Forwarding from 127.0.0.1:4711 -> 8000")) as url:
        assert url == "http://127.0.0.1:4711"
    with (
        pytest.raises(Failed, match="service/tiny-router: error: pod is not running"),
        tour.forwarded(_kubectl_that_says(tmp_path, "error: pod is not running")),
    ):
        raise AssertionError("it has no address")


def test_progress_tells_time_and_shows_signs_of_life() -> None:
    now = [0.0]
    lines: list[str] = []
    progress = Progress(lines.append, lambda: now[0])
    with progress.phase("build") as phase:
        phase.note("package 7")
        now[0] = 20.0
        progress.beat()
        progress.beat()
    assert lines == ["[   0.0s] build …", "[  20.0s] build … 20 s: package 7", "[  20.0s] build: done in 20.0 s"]


def test_jobs_side_by_side_all_end_before_the_first_error_is_raised() -> None:
    ended: list[str] = []

    def good() -> None:
        ended.append("good")

    def bad() -> None:
        raise KeyError("bad")

    try:
        together(bad, good)
    except KeyError:
        ended.append("raised")
    assert ended == ["good", "raised"]


def test_an_interrupt_ends_programs_of_other_threads() -> None:
    def compiler() -> None:
        follow(["sh", "-c", "echo started; exec sleep 60"], lambda _: stop_running())

    with pytest.raises(Failed, match="exit -15"):
        together(compiler)
