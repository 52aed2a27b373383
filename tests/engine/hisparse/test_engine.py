"""Whole engines on the CPU: the tokens are the same with hot buffers and without, whatever ran before."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from glm52_engine.config import ConfigError, EngineConfig, HiSparseConfig, KvCacheDtype, RoleConfig
from glm52_engine.kv import Pool
from glm52_engine.model import Model
from glm52_engine.model.cache import HotCache
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.executor import HostExecutor
from glm52_engine.runtime.load import Options, measure
from glm52_engine.runtime.rank import Rank
from glm52_engine.runtime.types import Blocks, Request
from tests.engine.model.support import prompt
from tests.engine.runtime.support import BLOCK, Maker, copy_blocks, generate, greedy, hand_over, idle

TOP_K = 32
OUTPUT = 20


class Hot(HostExecutor):
    """With hot buffers, and poison where nobody has written."""

    rows = 2 * TOP_K
    auto = False

    def __init__(self, model: Model, pool: Pool, *, seats: int, **rest: Any) -> None:
        spec = model.spec
        assert spec.index_topk == TOP_K
        hot = HotCache(
            pool.layout, pool, spec.indexer_types, top_k=TOP_K, seats=seats, rows=self.rows,
            longest=rest["blocks_per_seat"] if self.auto else None, debug=True,
        )  # fmt: skip
        super().__init__(model, pool, seats=seats, hot=hot, **rest)


class Smallest(Hot):
    """No row to spare: everything that a step does not select is evicted."""

    rows = TOP_K


class Auto(Hot):
    """Contexts lie whole as long as they fit."""

    auto = True


LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, TOP_K - 1, TOP_K, TOP_K + 1, 45, 2 * TOP_K, 2 * TOP_K + 1, 200)
"""Prompts at the borders of a block, of top-k, and of a hot buffer; an output crosses the next ones. 45 with its output
needs the first token of a block."""


@pytest.fixture(scope="module")
def maker(tiny_checkpoint: Path) -> Maker:
    return Maker(tiny_checkpoint)


def requests(name: str = "r") -> list[Request]:
    return [greedy(f"{name}{n}", tuple(prompt(n, seed=n)), OUTPUT) for n in LENGTHS]


def counted(engine: LocalEngine) -> dict[str, int]:
    """What all ranks counted; the rank threads must be at rest."""
    found: dict[str, int] = {}
    for rank in engine._ranks:
        executor = rank._executor
        assert isinstance(executor, HostExecutor)
        assert executor.hot is not None
        for name, value in executor.hot.pool.counters().items():
            found[name] = found.get(name, 0) + value
    return found


async def outputs(source: LocalEngine, target: LocalEngine, wanted: Sequence[Request]) -> list[list[int]]:
    made = await asyncio.gather(*(generate(source, target, request) for request in wanted))
    return [[token.id for token in tokens] for tokens in made]


@pytest.fixture(scope="module", params=["auto", "fp8"])
def plain(request: pytest.FixtureRequest, maker: Maker) -> tuple[KvCacheDtype, list[list[int]]]:
    """How KV is stored, and the tokens without hot buffers."""
    dtype: KvCacheDtype = request.param

    async def run() -> list[list[int]]:
        async with maker.running(kv_cache_dtype=dtype) as source, maker.running(kv_cache_dtype=dtype) as target:
            return await outputs(source, target, requests())

    return dtype, asyncio.run(run())


@pytest.mark.parametrize("launch_ahead", [False, True], ids=["in turn", "launch-ahead"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("executor", [Hot, Smallest, Auto])
async def test_tokens_are_the_same(
    maker: Maker, plain: tuple[KvCacheDtype, list[list[int]]], executor: type[Hot], ranks: int, launch_ahead: bool
) -> None:
    dtype, wanted = plain
    async with (
        maker.running(kv_cache_dtype=dtype) as source,
        maker.running(
            kv_cache_dtype=dtype, executor=executor, ranks=ranks, launch_ahead=launch_ahead, seats=4, blocks=40
        ) as target,
    ):
        assert await outputs(source, target, requests()) == wanted
        assert idle(target)
        assert any(rank.counters.steps_ahead for rank in target._ranks) == launch_ahead
        counters = counted(target)
    # Whether contexts stop lying whole depends on who meets whom.
    assert executor is Auto or counters["hits"] > counters["misses"] > 0
    assert counters["fetched"] > 0
    assert counters["unwritten"] == counters["out of bounds"] == 0


@pytest.mark.parametrize("launch_ahead", [False, True], ids=["in turn", "launch-ahead"])
async def test_contexts_lie_whole_again_when_the_crowd_has_gone(maker: Maker, launch_ahead: bool) -> None:
    """One request goes on while others come, fill the memory and leave: its tokens are those of a rank of its own."""
    wanted = [greedy(f"r{n}", tuple(prompt(n, seed=n)), tokens) for n, tokens in ((33, 60), (150, 20), (151, 20))]
    async with (
        maker.running() as source,
        maker.running() as plain,
        maker.running(executor=Auto, seats=4, launch_ahead=launch_ahead) as target,
    ):
        expected = await outputs(source, plain, wanted)
        ready = [await hand_over(source, target, request) for request in wanted]
        rank = target._ranks[0]
        assert isinstance(rank, Rank)
        pool = rank._executor.hot.pool  # type: ignore[attr-defined]
        # All are there before the rank sees the first of them: the last one does not fit beside the others.
        with rank._wake:
            streams = [target.decode(request, *place) for request, place in zip(wanted, ready, strict=True)]
        found = [[token.id async for token in stream] for stream in streams]
        assert [[first.id, *rest] for (_, first), rest in zip(ready, found, strict=True)] == expected
        assert (pool.whole, pool.switches) == (True, 2)
        assert idle(target)
        assert pool.frames_used[0] == 0
        counters = counted(target)
    assert counters["misses"] > 0
    assert counters["unwritten"] == counters["out of bounds"] == 0


@pytest.mark.parametrize("launch_ahead", [False, True], ids=["in turn", "launch-ahead"])
@pytest.mark.parametrize("executor", [Hot, Auto])
async def test_prompts_and_outputs_on_one_rank(maker: Maker, executor: type[Hot], launch_ahead: bool) -> None:
    """A rank that computes prompts beside decodes: the steps that have both write what the others read."""
    made = []
    for options in ({"executor": executor, "launch_ahead": launch_ahead}, {}):
        async with maker.running(**options) as engine:
            made.append(await asyncio.gather(*(_in_place(engine, request) for request in requests())))
            if options:
                assert counted(engine)["unwritten"] == 0
    assert made[0] == made[1]


async def _in_place(engine: LocalEngine, request: Request) -> list[int]:
    prefilled = await engine.prefill(dataclasses.replace(request, id=f"prompt of {request.id}"))
    blocks = await engine.reserve(request)
    copy_blocks(engine, prefilled, engine, blocks)
    engine.release(f"prompt of {request.id}")
    return [prefilled.token.id] + [token.id async for token in engine.decode(request, blocks, prefilled.token)]


@pytest.mark.parametrize(
    ("executor", "ranks", "launch_ahead"), [(Hot, 1, False), (Hot, 2, True), (Auto, 1, True), (Auto, 2, False)]
)
async def test_after_many_others(maker: Maker, executor: type[Hot], ranks: int, launch_ahead: bool) -> None:
    """Seats and blocks that five hundred requests have had, some of which were given up half-way."""
    async with (
        maker.running() as source,
        maker.running(executor=executor, ranks=ranks, launch_ahead=launch_ahead, seats=4, blocks=20) as target,
    ):
        fresh = await outputs(source, target, requests()[:-1])
        prefilled = await source.prefill(greedy("base", tuple(prompt(40, seed=7)), 3))

        async def other(number: int) -> None:
            request = greedy(f"o{number}", tuple(prompt(40, seed=7)), 2 + number % 9)
            blocks: Blocks = await target.reserve(request)
            copy_blocks(source, prefilled, target, blocks)
            stream = target.decode(request, blocks, prefilled.token)
            async for token in stream:
                if token.index == number % 5:
                    break
            target.release(request.id)

        for first in range(0, 500, 20):
            await asyncio.gather(*(other(number) for number in range(first, first + 20)))
        assert await outputs(source, target, requests("again")[:-1]) == fresh
        assert idle(target)
        assert counted(target)["unwritten"] == 0
        # Whoever left, in whatever way, has left its frames.
        assert [rank._executor.hot.pool.frames_used[0] for rank in target._ranks] == [0] * ranks  # type: ignore[attr-defined]


async def test_without_invalidation_the_tokens_differ(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the tests above: a seat's rows of the request before are taken for the next one's."""
    wanted = [greedy(f"r{seed}", tuple(prompt(60, seed=seed)), OUTPUT) for seed in range(4)]
    async with maker.running() as source:
        async with maker.running(seats=1) as target:
            right = await outputs(source, target, wanted)
        async with maker.running(executor=Hot, seats=1, blocks=6) as target:
            hot = target._ranks[0]._executor.hot  # type: ignore[attr-defined]
            monkeypatch.setattr(hot.pool, "assign", lambda seat, blocks, arrived: None)
            assert await outputs(source, target, wanted) != right


def role(**fields: Any) -> RoleConfig:
    return RoleConfig(ranks_per_host=1, host_pool_gib=1, max_num_seqs=4, **fields)


@pytest.mark.parametrize(("size", "rows"), [(None, 2 * TOP_K), (TOP_K, TOP_K), (100, 100)])
def test_rows_of_a_hot_buffer(tiny_checkpoint: Path, size: int | None, rows: int) -> None:
    config = role(hi_sparse=HiSparseConfig(device_buffer_size=size))
    found = measure(tiny_checkpoint, Options(config, max_model_len=64, block_size=BLOCK))
    assert found.hot_rows == rows


def test_a_hot_buffer_smaller_than_a_selection_is_refused(tiny_checkpoint: Path) -> None:
    config = role(hi_sparse=HiSparseConfig(device_buffer_size=TOP_K - 1))
    with pytest.raises(ConfigError, match=r"device_buffer_size: found 31; .*config\.json reads 32 .* 32 to 32767"):
        measure(tiny_checkpoint, Options(config, max_model_len=64, block_size=BLOCK))


def test_prefill_has_no_hot_buffers() -> None:
    fields = {
        "model": {"name": "m", "path": "/m", "max_model_len": 64, "weights_gib": 1},
        "drain": {"window_seconds": 1},
        "prefill": json.loads(role(hi_sparse=HiSparseConfig()).model_dump_json()),
    }
    with pytest.raises(ValueError, match="hi_sparse is for decode"):
        EngineConfig.model_validate(fields)
