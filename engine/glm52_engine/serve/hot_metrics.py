"""What /metrics says of seats, of the queue and of HiSparse. docs/metrics.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric

from glm52_engine.runtime.types import QUEUE_BOUNDS, HotCounters, Stats
from glm52_engine.serve.families import counters, gauges


def places(model: str, stats: Stats) -> Iterator[Metric]:
    """Seats, who waits for one, and the memory of whole contexts."""
    table = {
        "glm52_seats": ("Requests that can run at once", stats.seats_total),
        "glm52_queue_blocks": ("KV blocks that the waiting requests ask for", stats.queue_blocks),
        "glm52_host_pool_bytes": ("KV pools in this pod's host memory", stats.pool_bytes),
        "glm52_host_pool_seconds": ("Time to touch and pin them", stats.pool_seconds),
    }
    yield from gauges(model, table)
    position = HistogramMetricFamily(
        "glm52_queue_position", "Requests before one that came to wait, when it came", labels=["model_name"]
    )
    counts = zip((*map(str, QUEUE_BOUNDS), "+Inf"), itertools.accumulate(stats.queue_positions), strict=True)
    position.add_metric([model], list(counts), stats.queue_positions_sum)
    yield position


def hot(model: str, found: HotCounters) -> Iterator[Metric]:
    """HiSparse; vLLM's names where it has one."""
    counted = {
        "vllm:hisparse_cache_hits": ("Selected tokens that were in a hot buffer", found.hits),
        "vllm:hisparse_cache_misses": ("Selected tokens that were not", found.misses),
        "vllm:hisparse_host_to_device_bytes": ("Bytes of KV rows fetched from host memory", found.fetched_bytes),
        "glm52_hisparse_evictions": ("Tokens that made room in a hot buffer", found.evicted),
        "glm52_hisparse_switches": ("Changes between contexts that lie whole and hot buffers", found.switches),
    }
    yield from counters(model, counted)
    held = {
        "glm52_hisparse_rows": ("Rows of hot buffers, of layers with an indexer", found.rows),
        "glm52_hisparse_rows_held": ("Of those, the ones that hold a token", found.rows_held),
        "glm52_hisparse_frames": ("KV blocks that can lie whole beside the compute", found.frames),
        "glm52_hisparse_frames_used": ("Of those, the ones that do", found.frames_used),
        "glm52_hisparse_whole_ranks": ("Ranks whose contexts lie whole", found.whole_ranks),
    }
    yield from gauges(model, held)
