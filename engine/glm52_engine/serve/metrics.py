"""Prometheus: vLLM's names where vLLM has one, so that existing dashboards and autoscalers work. docs/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm52_engine.lifecycle.phases import Phase
from glm52_engine.runtime.stored import StoreCounters
from glm52_engine.runtime.types import Stats
from glm52_engine.serve import families, hot_metrics
from glm52_engine.transfer.hold import TransferCounters
from glm52_engine.transfer.rates import Path

disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
_TOKENS = tuple(float(digit * 10**zeros) for zeros in range(7) for digit in (1, 2, 5))[:19]


class _Snapshot(Collector):
    """Reads the engine's and the hand-off's counters when scraped: there is no second set that could disagree."""

    def __init__(
        self,
        model: str,
        stats: Callable[[], Stats | None],
        kv: TransferCounters,
        leases: Callable[[], int],
        phases: Callable[[], Iterable[tuple[str, Phase]]],
    ) -> None:
        self._model = model
        self._stats = stats
        self._kv = kv
        self._leases = leases
        self._phases = phases

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
        early = CounterMetricFamily("glm52_kv_early_bytes", "KV bytes that came while their prompt was computed")
        early.add_metric([], kv.bytes_early)
        yield early
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
        yield from _paths([path for path in kv.rates.paths.values() if path.rate])
        yield GaugeMetricFamily("glm52_kv_leases", "Prompts whose KV is held for a decode peer", value=self._leases())
        start = GaugeMetricFamily(
            "glm52_startup_phase_seconds", "Time of each phase of the start; phases overlap", labels=["host", "phase"]
        )
        for host, phase in self._phases():
            start.add_metric([host, phase.name], phase.ended - phase.began)
        yield start

    def _engine(self, stats: Stats) -> Iterator[Metric]:
        used = 1 - stats.blocks_free / stats.blocks_total if stats.blocks_total else 0.0
        gauges: families.Table = {
            "vllm:num_requests_running": ("Requests in the step loop", stats.running),
            "vllm:num_requests_waiting": ("Requests waiting for a seat or blocks", stats.waiting),
            "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1", used),
            "glm52_kv_blocks": ("KV blocks", stats.blocks_total),
            "glm52_kv_blocks_free": ("KV blocks that can be had at once", stats.blocks_free),
            "glm52_kv_blocks_cached": ("Free KV blocks that still hold a prefix", stats.blocks_cached),
        }
        yield from families.gauges(self._model, gauges)
        counters = {
            "vllm:prompt_tokens": ("Prompt tokens computed", stats.prompt_tokens_computed),
            "vllm:generation_tokens": ("Tokens generated", stats.tokens_generated),
            "vllm:prefix_cache_queries": ("Prompt tokens looked for in the prefix cache", stats.prefix_cache_queries),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", stats.prefix_cache_hits),
            "vllm:num_preemptions": ("Preempted requests: nothing is ever preempted", 0),
            "glm52_prompt_tokens_computed": (
                "Prompt tokens that went through the model here",
                stats.prompt_tokens_computed,
            ),
            "glm52_steps": ("Steps of the step loop", stats.steps),
        }
        yield from families.counters(self._model, counters)
        yield from hot_metrics.places(self._model, stats)
        if stats.hot is not None:
            yield from hot_metrics.hot(self._model, stats.hot)
        if stats.store is not None:
            yield from self._store(stats.store)

    def _store(self, store: StoreCounters) -> Iterator[Metric]:
        yield from families.gauges(self._model, {"glm52_store_up": ("Whether the store of prefixes answers", store.up)})
        counters = {
            "glm52_store_blocks_saved": ("KV blocks put into the store", store.blocks_saved),
            "glm52_store_blocks_dropped": ("KV blocks that the store did not get", store.blocks_dropped),
            "glm52_store_blocks_fetched": ("KV blocks that came from the store", store.blocks_fetched),
            "glm52_store_fetches_failed": ("Prompts that got less than was there", store.fetches_failed),
            "glm52_store_lookups_failed": ("Prompts for which the store did not answer", store.lookups_failed),
        }
        yield from families.counters(self._model, counters)


def _paths(measured: Sequence[Path]) -> Iterator[Metric]:
    """Nothing while nothing was measured: a series has a peer."""
    if not measured:
        return
    rate = GaugeMetricFamily("glm52_kv_path_bytes_per_second", "How fast KV comes from a prefill pod", labels=["peer"])
    slow = GaugeMetricFamily("glm52_kv_path_slow", "Whether that is too slow", labels=["peer"])
    for path in measured:
        rate.add_metric([path.peer], path.rate)
        slow.add_metric([path.peer], float(path.slow))
    yield rate
    yield slow


class Metrics:
    """What is counted and timed per request. Every series but those by status exists from the start, at zero."""

    def __init__(
        self,
        model: str,
        stats: Callable[[], Stats | None],
        kv: TransferCounters,
        leases: Callable[[], int],
        phases: Callable[[], Iterable[tuple[str, Phase]]] = tuple,
    ) -> None:
        """`phases`: host and phase of the start."""
        self.model = model
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Snapshot(model, stats, kv, leases, phases))
        self.success = self._counter("vllm:request_success", "Requests that finished", "finished_reason")
        self.aborted = self._counter("glm52_requests_aborted", "Requests whose client went away").labels(model)
        self.failed = self._counter("glm52_requests_failed", "Requests that were refused or failed", "status")
        seconds = self._histogram
        self.first_token = seconds("vllm:time_to_first_token_seconds", "From a call's arrival to its first token here")
        self.token_gap = seconds("vllm:inter_token_latency_seconds", "Between two tokens of a request", _TOKEN_SECONDS)
        self.latency = seconds("vllm:e2e_request_latency_seconds", "Whole time of a call at this pod")
        self.queue = seconds("vllm:request_queue_time_seconds", "Waiting for a seat and KV blocks")
        self.prefill = seconds("vllm:request_prefill_time_seconds", "From the seat to the first token")
        self.decode = seconds("vllm:request_decode_time_seconds", "From the first token here to the last")
        self.prompt = seconds("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.generated = seconds("vllm:request_generation_tokens", "Tokens of an answer", _TOKENS)
        self.max_tokens = seconds("vllm:request_params_max_tokens", "Most tokens that a request may have", _TOKENS)
        self.pull_seconds = seconds("glm52_kv_pull_seconds", "Time of one KV pull")

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["model_name", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry).labels(self.model)
