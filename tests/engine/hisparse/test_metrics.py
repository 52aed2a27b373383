"""What a decode pod with HiSparse tells of it: true numbers, and every row of the table."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from glm52_engine.config import HiSparseConfig, HiSparseMode, RoleConfig
from glm52_engine.runtime.load import Options, load_engine
from glm52_engine.serve.metrics import Metrics
from glm52_engine.sizing import GIB
from glm52_engine.transfer.hold import TransferCounters
from tests.engine.hisparse.test_engine import OUTPUT, TOP_K, Auto, Smallest, outputs
from tests.engine.model.support import prompt
from tests.engine.runtime.support import Maker, eventually, generate, greedy
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


@pytest.mark.parametrize(("mode", "whole"), [("auto", True), ("always", False)])
def test_an_engine_as_it_is_configured(tiny_checkpoint: Path, mode: HiSparseMode, whole: bool) -> None:
    role = RoleConfig(ranks_per_host=1, host_pool_gib=1, max_num_seqs=2, hi_sparse=HiSparseConfig(mode=mode))
    engine = load_engine(tiny_checkpoint, Options(role, max_model_len=256, block_size=16), on_phase=lambda phase: None)
    try:
        stats = engine.stats()
        assert stats.hot is not None
        assert (stats.hot.whole_ranks, stats.hot.frames > 0, stats.hot.rows > 0) == (whole, whole, True)
        assert stats.seats_total == 2
        pool = engine.pools[0]
        assert stats.pool_bytes == pool.num_blocks * pool.block_bytes > 0.99 * GIB
        assert stats.pool_seconds > 0
    finally:
        engine.stop()
    assert engine.stats().hot is None


async def test_places_in_the_queue_are_told(maker: Maker) -> None:
    """Of those who came to wait, how many were before them; and what all who wait ask for."""
    async with maker.running(seats=1, blocks=8) as engine:
        first = await engine.reserve(greedy("r0", (1, 2), 10))
        waiting = [asyncio.ensure_future(engine.reserve(greedy(f"r{n}", (1, 2), 40))) for n in (1, 2, 3)]
        await eventually(lambda: engine.stats().waiting == 3)
        stats = engine.stats()
        assert (stats.queue_positions[:4], stats.queue_positions_sum, stats.queue_blocks) == ((1, 1, 1, 0), 3, 9)
        text = Metrics("m", engine.stats, TransferCounters(), lambda: 0).text().decode()
        assert 'glm52_queue_position_bucket{le="1",model_name="m"} 2.0' in text
        assert 'glm52_queue_position_count{model_name="m"} 3.0' in text
        engine.release("r0")
        # In order, each when the one before has gone.
        for number, place in enumerate(waiting, 1):
            assert (await place).ids
            assert [other.done() for other in waiting] == [n < number for n in range(3)]
            engine.release(f"r{number}")
        assert len(first.ids) == 1
        assert engine.stats().queue_blocks == 0
