"""What a decode pod with HiSparse tells of it: true numbers, and every row of the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from glm52_engine.serve.metrics import Metrics
from glm52_engine.transfer.hold import TransferCounters
from tests.engine.hisparse.test_engine import OUTPUT, TOP_K, Auto, Smallest, outputs
from tests.engine.model.support import prompt
from tests.engine.runtime.support import Maker, generate, greedy
from tests.metrics_table import documented, served


@pytest.fixture(scope="module")
def maker(tiny_checkpoint: Path) -> Maker:
    return Maker(tiny_checkpoint)


async def test_a_context_that_lies_whole_is_fetched_once(maker: Maker) -> None:
    async with maker.running() as source, maker.running(executor=Auto, seats=4) as target:
        await generate(source, target, greedy("r", tuple(prompt(40)), OUTPUT))
        found = target.stats().hot
        assert found is not None
        layout = target._executors[0].pool.layout
        assert found.fetched_bytes == 40 * layout.layers * layout.mla_row_bytes
        assert (found.hits, found.misses, found.rows_held) == (0, 0, 0)
        assert (found.whole_ranks, found.frames_used, found.frames > 0) == (1, 0, True)
        text = Metrics("m", target.stats, TransferCounters(), lambda: 0).text().decode()
        told = served(text_string_to_metric_families(text))
        assert {row for row in told if "hisparse" in row[0]} == documented()["hiSparse"]
        assert f'vllm:hisparse_host_to_device_bytes_total{{model_name="m"}} {float(found.fetched_bytes)}' in text


async def test_hot_rows_and_evictions(maker: Maker) -> None:
    """Two ranks together; nothing is dropped but by eviction while one request a seat runs."""
    async with maker.running() as source, maker.running(executor=Smallest, seats=1, ranks=2) as target:
        await outputs(source, target, [greedy(f"r{n}", tuple(prompt(200, seed=n)), OUTPUT) for n in range(2)])
        found = target.stats().hot
    assert found is not None
    groups = sum(kind == "full" for kind in maker.spec.indexer_types)
    assert found.rows == 2 * groups * TOP_K
    assert 0 < found.rows_held <= found.rows
    assert found.misses == found.evicted + found.rows_held
    assert (found.frames, found.whole_ranks) == (0, 0)


async def test_without_it_nothing_is_told(maker: Maker) -> None:
    async with maker.running() as engine:
        assert engine.stats().hot is None
        assert b"hisparse" not in Metrics("m", engine.stats, TransferCounters(), lambda: 0).text()
