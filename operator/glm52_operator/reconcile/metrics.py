"""What the operator counts and times. docs/metrics.md lists it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm52_operator.desired.target import Object
from glm52_operator.plan.drains import DrainOutcome
from glm52_operator.reconcile.kinds import DEPLOYMENT_RESOURCE, REVIEW, Kind
from glm52_operator.reconcile.queue import WorkQueue
from glm52_operator.reconcile.store import Key, Store
from glm52_operator.status.news import new_crashes, new_ends

disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SETTLED, WAITING, FAILED, BROKEN = "settled", "waiting", "failed", "broken"
"""Results of a pass: nothing to wait for, looked at again soon, refused or unreachable, a bug."""

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STATES = {"True": 1.0, "False": 0.0, "Unknown": -1.0}


class _State(Collector):
    """Read from queue and store when asked for: what is gone there is gone here."""

    def __init__(self, queue: WorkQueue[Key], store: Store) -> None:
        self._queue = queue
        self._store = store

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "glm52_operator_queue_depth", "Deployments that wait for a pass", value=self._queue.depth()
        )
        yield GaugeMetricFamily(
            "glm52_operator_queue_oldest_seconds", "Age of the oldest of them", value=self._queue.oldest_waiting()
        )
        conditions = GaugeMetricFamily(
            "glm52_deployment_condition",
            "1: True, 0: False, -1: Unknown",
            labels=["namespace", "name", "condition"],
        )
        leaving = GaugeMetricFamily(
            "glm52_deployment_leaving_pods", "Pods that drain or end", labels=["namespace", "name"]
        )
        for key in self._store.deployments():
            resource = self._store.get(DEPLOYMENT_RESOURCE, *key) or {}
            for condition in resource.get("status", {}).get("conditions", []):
                conditions.add_metric([*key, condition["type"]], _STATES.get(condition["status"], -1.0))
            drains = resource.get("status", {}).get("drains", [])
            leaving.add_metric(list(key), sum(drain.get("phase") != "Ended" for drain in drains))
        yield conditions
        yield leaving


class Metrics:
    def __init__(self, queue: WorkQueue[Key], store: Store) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_State(queue, store))
        self.passes = Histogram(
            "glm52_operator_reconcile_seconds",
            "Time of one pass over a deployment",
            ["result"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        for result in (SETTLED, WAITING, FAILED, BROKEN):
            self.passes.labels(result)
        self._errors = Counter(
            "glm52_operator_api_errors",
            "Requests that the API server refused or that did not reach it",
            ["verb", "kind", "code"],
            registry=self._registry,
        )
        self._writes = Counter(
            "glm52_operator_writes", "Writes that the API server took", ["verb", "kind"], registry=self._registry
        )
        self.watch_restarts = Counter(
            "glm52_operator_watch_restarts",
            "Watches that had to begin anew with a list",
            ["kind"],
            registry=self._registry,
        )

        self.leading = Gauge(
            "glm52_operator_leading",
            "1: this process holds the lease and acts; 0: it stands by",
            registry=self._registry,
        )

        self._crashes = Counter(
            "glm52_operator_crashes",
            "Ends of containers that nobody had asked for",
            ["reason"],
            registry=self._registry,
        )
        self._drains = Counter(
            "glm52_operator_drains", "Pods that were told to go and are gone", ["outcome"], registry=self._registry
        )
        for outcome in DrainOutcome:
            self._drains.labels(outcome.value)

    def written(self, before: Object, after: Object) -> None:
        """A status was written in place of another one."""
        for crash in new_crashes(before, after):
            self._crashes.labels(crash["reason"]).inc()
        for drain in new_ends(before, after):
            self._drains.labels(drain.get("outcome", DrainOutcome.UNKNOWN.value)).inc()

    def answered(self, verb: str, kind: Kind, code: int) -> None:
        """One request is over; code 0: it did not reach the API server."""
        if not 200 <= code <= 299:
            # Looking whether something exists, and deleting what has gone already, are no faults.
            if code != 404 or verb not in ("get", "delete"):
                self._errors.labels(verb, kind.kind, str(code)).inc()
        elif verb not in ("get", "list") and kind is not REVIEW:
            self._writes.labels(verb, kind.kind).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
