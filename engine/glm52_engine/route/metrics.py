"""What the router counts and times. docs/metrics.md lists it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm52_engine.config import Role
from glm52_engine.route.pools import Pools

disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _Pods(Collector):
    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("glm52_router_ready_pods", "Pods that take new requests", labels=["role"])
        busy = GaugeMetricFamily("glm52_router_in_flight", "Calls in progress by pod", labels=["role", "pod"])
        for role in get_args(Role):
            urls = self._pools.ready(role)
            ready.add_metric([role], len(urls))
            for url in sorted(urls):
                busy.add_metric([role, url], self._pools.in_flight(url))
        yield ready
        yield busy


class RouterMetrics:
    def __init__(self, pools: Pools, body_bytes: Callable[[], int]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Pods(pools))
        held = Gauge("glm52_router_body_bytes", "Bytes of clients' bodies that are held", registry=self._registry)
        held.set_function(body_bytes)
        self.requests = Counter(
            "glm52_router_requests", "Client requests by status", ["endpoint", "status"], registry=self._registry
        )
        self.retries = Counter("glm52_router_retries", "Legs that were tried again", registry=self._registry)
        self.aborted = Counter("glm52_router_aborted", "Requests whose client went away", registry=self._registry)
        self.frozen = Counter("glm52_router_frozen", "Calls cut since their pod was frozen", registry=self._registry)
        self.first_byte = self._seconds(
            "time_to_first_byte", "From a request's arrival to the first byte of its answer"
        )
        self.whole = self._seconds("request", "Whole time of a client request")

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        full = f"glm52_router_{name}_seconds"
        return Histogram(full, text, ["endpoint"], buckets=_SECONDS, registry=self._registry)
