"""Which way to a cluster a machine allows, and what it is told where it allows none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster import __main__, golang, lifecycle, machine
from e2e.cluster.errors import Refused
from e2e.cluster.machine import Facts, Way, check_kubeconfig_mode, decide, has_sys_resource
from e2e.cluster.paths import find

BARE = Facts(
    system="Linux", machine="x86_64", root=True, docker_answers=False, dockerd=False, apt=True,
    foreign_docker=False, sys_resource=True, cgroup_v2=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "published", "way"),
    [
        (replace(BARE, docker_answers=True, root=False), True, Way("yours", "published")),
        (replace(BARE, docker_answers=True, system="Darwin", apt=False), True, Way("yours", "published")),
        (replace(BARE, docker_answers=True), False, Way("yours", "built")),
        (BARE, False, Way("private", "built")),
        (replace(BARE, foreign_docker=True, dockerd=True), False, Way("private", "built")),
    ],
)
def test_ways(facts: Facts, published: bool, way: Way) -> None:
    assert decide(facts, published) == way


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        (replace(BARE, root=False), "run this as root"),
        (replace(BARE, root=False, docker_answers=True), "cannot be pulled"),
        (replace(BARE, apt=False), "apt-get is missing"),
        (replace(BARE, system="Darwin"), "start Docker"),
        (replace(BARE, foreign_docker=True), "install docker-ce"),
    ],
)
def test_refusals_are_one_sentence_with_a_remedy(facts: Facts, remedy: str) -> None:
    with pytest.raises(Refused, match=remedy) as refusal:
        decide(facts, published_image=False)
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).endswith(".")


def test_capability_is_read_from_the_bounding_set() -> None:
    assert has_sys_resource("CapEff:\t0\nCapBnd:\t000001ffffffffff\n")
    assert not has_sys_resource("CapEff:\t000001ffffffffff\nCapBnd:\t000001fffeffffff\n")


def test_kubeconfig_mode_names_all_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"KUBECONFIG .*GLM52_OPERATOR_IMAGE .*GLM52_ENGINE_IMAGE"):
        check_kubeconfig_mode({})
    images = {"GLM52_OPERATOR_IMAGE": "o:1", "GLM52_ENGINE_IMAGE": "e:1"}
    with pytest.raises(Refused, match="is no file"):
        check_kubeconfig_mode({**images, "KUBECONFIG": str(tmp_path / "none")})
    (tmp_path / "config").touch()
    check_kubeconfig_mode({**images, "KUBECONFIG": str(tmp_path / "config")})


def test_a_refusal_exits_2_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Path("/tmp/glm52-no-such-cache")  # tmp_path is too long for sockets
    monkeypatch.setenv("GLM52_CACHE", str(cache))
    monkeypatch.delenv("CLUSTER", raising=False)
    monkeypatch.setattr(machine, "probe", lambda: replace(BARE, root=False))
    assert __main__.main(["up"]) == 2
    assert "run this as root" in capsys.readouterr().err
    assert not cache.exists()


def test_an_unknown_kind_of_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="CLUSTER=minikube"):
        lifecycle.ensure(env={"CLUSTER": "minikube", "HOME": "/root"})


def test_a_path_too_long_for_sockets_is_refused() -> None:
    with pytest.raises(Refused, match="GLM52_CACHE"):
        find({"GLM52_CACHE": "/" + "x" * 80})
    assert find({"XDG_CACHE_HOME": "/c"}).cache == Path("/c/glm52")
    assert find({"HOME": "/home/me"}).cache == Path("/home/me/.cache/glm52")


@pytest.mark.parametrize(
    ("version", "enough"),
    [("go1.26.6", True), ("go1.27", True), ("go1.26.5", False), ("go1.9", False), ("devel", False)],
)
def test_go_versions(version: str, enough: bool) -> None:
    assert golang.new_enough(version) is enough
