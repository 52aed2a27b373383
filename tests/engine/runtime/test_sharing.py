"""The engine's side of a store: who holds which block while something is on its way. The store itself is a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from glm52_engine.runtime.executor import HostExecutor
from tests.engine.model.support import prompt
from tests.engine.runtime.shelf import Shelf
from tests.engine.runtime.support import BLOCK, Maker, eventually, generate, greedy, idle

HEAD = tuple(prompt(3 * BLOCK, seed=31))


async def filled(maker: Maker, **options: Any) -> Shelf:
    shelf = Shelf()
    engine = maker.make(**options)
    engine.use_store(shelf)
    engine.start()
    await engine.prefill(greedy("first", (*HEAD, 65), 4))
    engine.release("first")
    await eventually(lambda: len(shelf.kept) == 3)
    engine.stop()
    return shelf


@pytest.mark.parametrize("most", [0, 2, 3])
async def test_what_comes_is_used_and_the_rest_computed(maker: Maker, most: int) -> None:
    asked = greedy("r", (*HEAD, *prompt(7, seed=1)), 6, ignore_eos=True)
    async with maker.running(prefix_cache=False) as plain, maker.running() as target:
        expected = [token.id for token in await generate(plain, target, asked)]
        shelf = await filled(maker)
        shelf.most = most
        engine = maker.make()
        engine.use_store(shelf)
        engine.start()
        assert [token.id for token in await generate(engine, target, asked)] == expected
        assert engine.stats().prompt_tokens_computed == len(asked.prompt) - most * BLOCK
        assert engine.stats().prefix_cache_hits == most * BLOCK
        engine.stop()


async def test_a_request_that_is_given_up_keeps_its_blocks_until_nothing_writes_there(maker: Maker) -> None:
    shelf = await filled(maker)
    engine = maker.make()
    engine.use_store(shelf)
    engine.start()
    shelf.hold()
    call = asyncio.create_task(engine.prefill(greedy("r", (*HEAD, 66), 4)))
    await eventually(lambda: bool(shelf.held))
    call.cancel()
    await asyncio.wait([call])
    assert shelf.fetches[-1].cancelled
    assert not idle(engine)
    # The same id may come again meanwhile.
    again = asyncio.create_task(engine.prefill(greedy("r", (*HEAD, 66), 4)))
    await eventually(lambda: len(shelf.held or []) == 2)
    engine.check_integrity()
    shelf.go_on()
    assert (await again).cached_tokens == 3 * BLOCK
    engine.release("r")
    await eventually(lambda: idle(engine))
    engine.check_integrity()
    engine.stop()


async def test_blocks_on_their_way_out_are_nobody_elses(maker: Maker) -> None:
    shelf = Shelf()
    engine = maker.make(blocks=8)
    engine.use_store(shelf)
    engine.start()
    shelf.hold()
    await engine.prefill(greedy("a", (*HEAD, 65), 4))
    engine.release("a")
    engine.check_integrity()
    assert engine.stats().blocks_free == 8 - 3
    waiting = asyncio.create_task(engine.prefill(greedy("b", tuple(prompt(6 * BLOCK, seed=5)), 4)))
    await eventually(lambda: engine.stats().waiting == 1)
    shelf.go_on()
    await waiting
    engine.release("b")
    await eventually(lambda: idle(engine))
    engine.stop()


async def test_a_store_that_does_not_answer_holds_nobody_up(maker: Maker) -> None:
    shelf = await filled(maker)
    shelf.answers = False
    engine = maker.make()
    engine.use_store(shelf)
    engine.start()
    assert (await engine.prefill(greedy("r", (*HEAD, 66), 4))).cached_tokens == 0
    assert shelf.counters.lookups_failed == 1
    engine.stop()


async def test_a_device_is_told_of_what_arrived_and_of_nothing_else(maker: Maker) -> None:
    begun: list[int] = []

    class Watching(HostExecutor):
        def begin(self, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
            begun.append(arrived)
            super().begin(seat, blocks, arrived=arrived)

    shelf = await filled(maker)
    engine = maker.make(executor=Watching)
    engine.use_store(shelf)
    engine.start()
    for name in ("a", "b"):  # the second finds the prefix in the pool, where the device has it too
        await engine.prefill(greedy(name, (*HEAD, 66), 4))
    assert begun == [3 * BLOCK, 0]
    engine.stop()


async def test_kv_that_gave_no_numbers_is_not_found_again(maker: Maker) -> None:
    shelf = await filled(maker)
    for block in shelf.kept.values():
        block.fill_(255)
    engine = maker.make()
    engine.use_store(shelf)
    engine.start()
    spoilt = await engine.prefill(greedy("a", (*HEAD, 66), 4))
    assert spoilt.token.finish == "error"
    engine.release("a")
    assert not shelf.kept
    whole = await engine.prefill(greedy("b", (*HEAD, 66), 4))
    assert (whole.token.finish, whole.cached_tokens) == (None, 0)
    engine.stop()
