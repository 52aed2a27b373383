"""What the operator's /metrics says, and that docs/metrics.md lists it."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from glm52_operator.reconcile.kinds import DEPLOYMENT_RESOURCE, POD
from glm52_operator.reconcile.metrics import Metrics
from glm52_operator.reconcile.queue import WorkQueue
from glm52_operator.reconcile.store import Key, Store
from tests.metrics_table import documented, served
from tests.operator.builders import resource
from tests.operator.conftest import FakeClock


@pytest.fixture
def queue(clock: FakeClock) -> WorkQueue[Key]:
    return WorkQueue(clock)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def metrics(queue: WorkQueue[Key], store: Store) -> Metrics:
    return Metrics(queue, store)


def families(metrics: Metrics) -> list[Any]:
    return list(text_string_to_metric_families(metrics.text().decode()))


def values(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """By label values in the order of the labels' names."""
    samples = [sample for family in families(metrics) for sample in family.samples if sample.name == name]
    return {tuple(value for _, value in sorted(s.labels.items())): s.value for s in samples}


def deployed(**conditions: str) -> dict[str, Any]:
    said = [{"type": kind, "status": status} for kind, status in conditions.items()]
    return {**resource(), "status": {"conditions": said}}


def test_the_table_lists_what_is_there(metrics: Metrics, store: Store) -> None:
    store.observe(DEPLOYMENT_RESOURCE, deployed(Ready="True"))
    metrics.answered("patch", POD, 200)
    metrics.answered("list", POD, 403)
    metrics.watch_restarts.labels("Pod").inc()
    metrics.written({}, {"crashes": [{"id": "a", "reason": "Crashed"}]})
    assert served(families(metrics)) == documented()["operator"]


def test_crashes_and_drains_are_counted_by_what_a_status_has_anew(metrics: Metrics, store: Store) -> None:
    drain = {"uid": "u", "phase": "Draining"}
    ended = {"uid": "u", "phase": "Ended", "outcome": "Killed"}
    first = {"crashes": [{"id": "a", "reason": "OOMKilled"}], "drains": [drain]}
    second = {"crashes": [{"id": "b", "reason": "OOMKilled"}, *first["crashes"]], "drains": [ended]}
    for before, after in (({}, first), (first, first), (first, second), (second, second)):
        metrics.written(before, after)
    assert values(metrics, "glm52_operator_crashes_total") == {("OOMKilled",): 2}
    assert values(metrics, "glm52_operator_drains_total")[("Killed",)] == 1
    store.observe(DEPLOYMENT_RESOURCE, {**deployed(), "status": first})
    assert values(metrics, "glm52_deployment_leaving_pods") == {("chat", "ns"): 1}


async def test_the_queue(metrics: Metrics, queue: WorkQueue[Key], clock: FakeClock) -> None:
    def shown() -> tuple[float, float]:
        names = ("glm52_operator_queue_depth", "glm52_operator_queue_oldest_seconds")
        depth, oldest = (values(metrics, name)[()] for name in names)
        return depth, oldest

    assert shown() == (0, 0)
    queue.add(("ns", "a"))
    clock.advance(7)
    queue.add(("ns", "b"))
    queue.add(("ns", "a"))
    assert shown() == (2, 7)
    await queue.get()
    assert shown() == (1, 0)


def test_conditions_follow_the_object_and_go_with_it(metrics: Metrics, store: Store) -> None:
    obj = deployed(Ready="True", DecodeReady="False", Schedulable="Unknown")
    store.observe(DEPLOYMENT_RESOURCE, obj)
    assert values(metrics, "glm52_deployment_condition") == {
        ("Ready", "chat", "ns"): 1,
        ("DecodeReady", "chat", "ns"): 0,
        ("Schedulable", "chat", "ns"): -1,
    }
    store.remove(DEPLOYMENT_RESOURCE, obj)
    assert values(metrics, "glm52_deployment_condition") == {}


def test_errors_and_writes_by_kind(metrics: Metrics) -> None:
    for verb, code in (("patch", 200), ("patch", 200), ("get", 200), ("get", 404), ("patch", 403), ("list", 0)):
        metrics.answered(verb, POD, code)
    assert values(metrics, "glm52_operator_writes_total") == {("Pod", "patch"): 2}
    assert values(metrics, "glm52_operator_api_errors_total") == {("403", "Pod", "patch"): 1, ("0", "Pod", "list"): 1}
