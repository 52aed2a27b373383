from __future__ import annotations

from typing import Any

import pytest

from glm52_engine.route.slices import SliceStore, ready_urls


def piece(name: str, *endpoints: dict[str, Any], ports: Any = ({"name": "http", "port": 8000},)) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": "7"}, "endpoints": list(endpoints), "ports": list(ports)}


def endpoint(address: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions}


@pytest.mark.parametrize(
    ("one", "taken"),
    [
        pytest.param(endpoint("10.0.0.1", ready=True, serving=True, terminating=False), True, id="ready"),
        pytest.param(endpoint("10.0.0.1", ready=False, serving=False), False, id="not ready"),
        pytest.param(endpoint("10.0.0.1", ready=False, serving=True, terminating=True), False, id="terminating"),
        pytest.param(endpoint("10.0.0.1", ready=True, terminating=True), False, id="terminating, said to be ready"),
        pytest.param(endpoint("10.0.0.1", ready=None), True, id="unknown is ready"),
        pytest.param({"addresses": ["10.0.0.1"]}, True, id="no conditions"),
        pytest.param({"addresses": [], "conditions": {"ready": True}}, False, id="no address"),
    ],
)
def test_which_endpoints_take_requests(one: dict[str, Any], taken: bool) -> None:
    assert ready_urls([piece("a", one)]) == ({"http://10.0.0.1:8000"} if taken else set())


@pytest.mark.parametrize(
    ("slice_", "url"),
    [
        pytest.param(piece("a", endpoint("fd00::1")), "http://[fd00::1]:8000", id="IPv6"),
        pytest.param(
            piece("a", endpoint("10.0.0.1"), ports=[{"name": "metrics", "port": 9}, {"name": "http", "port": 81}]),
            "http://10.0.0.1:81",
            id="the port named http",
        ),
        pytest.param(
            piece("a", endpoint("10.0.0.1"), ports=[{"port": 82}]), "http://10.0.0.1:82", id="a nameless port"
        ),
        pytest.param(piece("a", endpoint("10.0.0.1"), ports=[]), "http://10.0.0.1:8000", id="no port"),
        pytest.param({**piece("a", endpoint("10.0.0.1")), "ports": None}, "http://10.0.0.1:8000", id="null"),
    ],
)
def test_urls(slice_: dict[str, Any], url: str) -> None:
    assert ready_urls([slice_]) == {url}


def test_a_service_may_have_many_slices_or_none() -> None:
    assert ready_urls([piece("a", endpoint("10.0.0.1")), piece("b", endpoint("10.0.0.2"))]) == {
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
    }
    assert ready_urls([{**piece("a"), "endpoints": None}]) == frozenset()


def test_the_store_follows_events() -> None:
    store = SliceStore()
    store.replace({"metadata": {"resourceVersion": "5"}, "items": [piece("a", endpoint("10.0.0.1"))]})
    assert store.version == "5"
    assert store.apply({"type": "ADDED", "object": piece("b", endpoint("10.0.0.2"))})
    assert store.apply({"type": "MODIFIED", "object": piece("a", endpoint("10.0.0.1", ready=False))})
    assert store.urls() == {"http://10.0.0.2:8000"}
    assert store.apply({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}})
    assert store.version == "9"
    assert store.apply({"type": "DELETED", "object": piece("b")})
    assert store.urls() == frozenset()
    assert not store.apply({"type": "ERROR", "object": {"code": 410}})


def pod(name: str, number: int) -> dict[str, Any]:
    return {**endpoint(f"10.0.0.{number}", ready=True), "targetRef": {"kind": "Pod", "name": name}}


def test_of_a_replica_of_several_hosts_the_leader_takes_requests() -> None:
    found = piece("a", *(pod(f"chat-decode-{n}", n) for n in range(9)), pod("somebody-else", 99), endpoint("10.0.0.98"))
    assert ready_urls([found], hosts=4) == {f"http://10.0.0.{n}:8000" for n in (0, 4, 8)}
