"""Prometheus: vLLM's names where vLLM has one, so that existing dashboards and autoscalers work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm52_engine.runtime.types import Stats
from glm52_engine.transfer.hold import TransferCounters

disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _Snapshot(Collector):
    """Reads the engine's and the hand-off's counters when scraped: there is no second set that could disagree."""

    def __init__(
        self, model: str, stats: Callable[[], Stats | None], kv: TransferCounters, leases: Callable[[], int]
    ) -> None:
        self._model = model
        self._stats = stats
        self._kv = kv
        self._leases = leases

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is not None:
            yield from self._engine(stats)
        kv = self._kv
        total = CounterMetricFamily(
            "glm52_kv_transfer_bytes", "KV bytes that crossed between pods", labels=["direction"]
        )
        total.add_metric(["in"], kv.bytes_in)
        total.add_metric(["out"], kv.bytes_out)
        yield total
        ends = CounterMetricFamily("glm52_kv_transfers", "KV hand-offs by how they ended", labels=["outcome"])
        for outcome, count in (
            ("pulled", kv.pulls),
            ("pull_failed", kv.pulls_failed),
            ("handed_over", kv.handed_over),
            ("given_up", kv.given_up),
            ("expired", kv.expired),
        ):
            ends.add_metric([outcome], count)
        yield ends
        yield GaugeMetricFamily("glm52_kv_leases", "Prompts whose KV is held for a decode peer", value=self._leases())

    def _engine(self, stats: Stats) -> Iterator[Metric]:
        gauges = {
            "vllm:num_requests_running": ("Requests in the step loop", float(stats.running)),
            "vllm:num_requests_waiting": ("Requests waiting for a seat or blocks", float(stats.waiting)),
            "vllm:kv_cache_usage_perc": (
                "Share of KV blocks in use, 0 to 1",
                1 - stats.blocks_free / stats.blocks_total if stats.blocks_total else 0.0,
            ),
            "glm52_kv_blocks_free": ("Free KV blocks", float(stats.blocks_free)),
            "glm52_kv_blocks": ("KV blocks", float(stats.blocks_total)),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        counters = {
            "vllm:prompt_tokens": ("Prompt tokens computed", stats.prompt_tokens_computed),
            "vllm:generation_tokens": ("Tokens generated", stats.tokens_generated),
            "glm52_prompt_tokens_computed": (
                "Prompt tokens that went through the model here",
                stats.prompt_tokens_computed,
            ),
            "glm52_steps": ("Steps of the step loop", stats.steps),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter


class Metrics:
    def __init__(
        self, model: str, stats: Callable[[], Stats | None], kv: TransferCounters, leases: Callable[[], int]
    ) -> None:
        registry = self._registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(model, stats, kv, leases))
        self.success = Counter(
            "vllm:request_success", "Requests that finished", ["model_name", "finished_reason"], registry=registry
        )
        self.aborted = Counter(
            "glm52_requests_aborted", "Requests whose client went away", ["model_name"], registry=registry
        )
        self.failed = Counter(
            "glm52_requests_failed", "Requests that failed", ["model_name", "status"], registry=registry
        )
        self.first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of the call at this pod to its first token",
            ["model_name"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "Whole time of a call at this pod",
            ["model_name"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.pull_seconds = Histogram(
            "glm52_kv_pull_seconds", "Time of one KV pull", ["model_name"], buckets=_SECONDS, registry=registry
        )
        self.model = model
        for metric in (self.aborted, self.first_token, self.latency, self.pull_seconds):
            metric.labels(model)

    def text(self) -> bytes:
        return generate_latest(self._registry)
