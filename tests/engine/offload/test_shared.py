"""Two pods, one store: what one has computed the other need not, and nothing of the store's is anybody's error."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from glm52_engine.config import StoreConfig
from glm52_engine.offload.store import PrefixStore
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.record import EngineStopped
from glm52_engine.runtime.types import Request, Token
from tests.engine.model.support import prompt
from tests.engine.offload.conftest import Master, in_time
from tests.engine.runtime.support import BLOCK, Maker, copy_blocks, greedy, idle

HEAD = 6


def make_store(engine: LocalEngine, master: Master) -> PrefixStore:
    pool = engine.pools[0]
    return PrefixStore(
        StoreConfig(master=master.address, store_gib=1),
        engine.layout,
        block_bytes=pool.block_bytes,
        pool_blocks=pool.num_blocks,
        host="127.0.0.1",
    )


@asynccontextmanager
async def pod(maker: Maker, master: Master, **options: Any) -> AsyncIterator[tuple[LocalEngine, PrefixStore]]:
    """A prefill engine with its part of the store, once the store answers."""
    engine = maker.make(**options)
    store = make_store(engine, master)
    engine.use_store(store)
    store.start()
    engine.start()
    try:
        await in_time(lambda: store.counters.up)
        yield engine, store
    finally:
        engine.stop()


def request(name: str, seed: int, *, head: int, own: int = 5, **options: Any) -> Request:
    return greedy(name, (*prompt(HEAD * BLOCK, seed=head), *prompt(own, seed=seed)), 8, ignore_eos=True, **options)


async def answer(source: LocalEngine, target: LocalEngine, asked: Request) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were found."""
    prefilled = await source.prefill(asked)
    blocks = await target.reserve(asked)
    copy_blocks(source, prefilled, target, blocks)
    source.release(asked.id)
    tokens: list[Token] = [prefilled.token, *[token async for token in target.decode(asked, blocks, prefilled.token)]]
    return [token.id for token in tokens], prefilled.cached_tokens


async def test_the_second_pod_computes_only_the_rest(maker: Maker, master: Master) -> None:
    asked = request("b", 2, head=100)
    async with maker.running(prefix_cache=False) as plain, maker.running() as target:
        expected, _ = await answer(plain, target, asked)
        async with pod(maker, master) as (first, stored), pod(maker, master) as (second, fetched):
            await answer(first, target, request("a", 1, head=100))
            await in_time(lambda: stored.counters.blocks_saved == HEAD and idle(first))
            tokens, found = await answer(second, target, asked)
            assert (tokens, found) == (expected, HEAD * BLOCK)
            assert second.stats().prompt_tokens_computed == len(asked.prompt) - found
            assert second.stats().prefix_cache_hits == found
            assert fetched.counters.blocks_fetched == HEAD
            # From now on it has the prefix itself.
            await answer(second, target, request("c", 3, head=100))
            assert fetched.counters.blocks_fetched == HEAD
            await in_time(lambda: idle(second))
            second.check_integrity()


async def test_a_store_that_is_lost_and_comes_back_costs_only_computation(maker: Maker, master: Master) -> None:
    asked = request("b", 2, head=200)
    async with maker.running(prefix_cache=False) as plain, maker.running() as target:
        expected, _ = await answer(plain, target, asked)
        async with pod(maker, master) as (first, stored), pod(maker, master) as (second, fetched):
            await answer(first, target, request("a", 1, head=200))
            await in_time(lambda: stored.counters.blocks_saved == HEAD)
            master.kill()
            assert await answer(second, target, asked) == (expected, 0)
            await in_time(lambda: not stored.counters.up and not fetched.counters.up)
            # Lost is lost, and nobody waits for it any more.
            assert (await answer(first, target, request("c", 3, head=201)))[1] == 0
            await in_time(lambda: idle(first) and idle(second))

            master.start()
            head = await saved_again(first, stored, target)
            await in_time(lambda: fetched.counters.up)
            assert (await answer(second, target, request("e", 5, head=head)))[1] == HEAD * BLOCK


async def saved_again(engine: LocalEngine, store: PrefixStore, target: LocalEngine) -> int:
    """The seed of a prefix that the store has all of. The first ones may be refused: a new master learns of the pods'
    memory one by one."""
    for head in range(202, 260):
        await in_time(lambda: store.counters.up)
        before = store.counters.blocks_saved
        await answer(engine, target, request(f"d{head}", 4, head=head))
        await in_time(lambda: idle(engine))
        if store.counters.blocks_saved == before + HEAD:
            return head
    raise AssertionError("the store never took a prefix whole")


async def test_a_pod_starts_and_serves_without_a_master_and_takes_part_once_there_is_one(
    maker: Maker, master: Master
) -> None:
    master.kill()
    engine = maker.make()
    store = make_store(engine, master)
    engine.use_store(store)
    store.start()
    engine.start()
    try:
        await engine.prefill(request("a", 1, head=300))
        engine.release("a")
        assert not store.counters.up
        assert store.counters.blocks_dropped == HEAD
        assert idle(engine)
        master.start()
        await in_time(lambda: store.counters.up)
        await engine.prefill(request("b", 2, head=300))
        engine.release("b")
        # All of the prompt, also what was computed before the store was there.
        await in_time(lambda: store.counters.blocks_saved == HEAD)
    finally:
        engine.stop()


async def test_a_client_that_dies_is_made_anew(maker: Maker, master: Master) -> None:
    async with maker.running() as target, pod(maker, master) as (engine, store):
        before = store.link.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await in_time(lambda: store.counters.up and store.link.pid not in (None, before))
        await answer(engine, target, request("a", 1, head=400))
        # The master may still send some to where the dead one was.
        await in_time(lambda: store.counters.blocks_saved + store.counters.blocks_dropped == HEAD and idle(engine))


async def test_bytes_that_are_not_the_block_are_not_used(maker: Maker, master: Master) -> None:
    asked = request("b", 2, head=500)
    async with maker.running(prefix_cache=False) as plain, maker.running() as target:
        expected, _ = await answer(plain, target, asked)
        async with pod(maker, master) as (first, stored), pod(maker, master) as (second, fetched):
            keys = first._checked(asked)
            channel = stored.link.channel(1)  # the writer's, which has nothing to do
            channel.slot(0)[:] = bytes(len(channel.slot(0)))
            assert channel.call("put", [stored._names.of(keys[0])], 30.0) == [0]
            assert await answer(second, target, asked) == (expected, 0)
            assert (fetched.counters.fetches_failed, fetched.counters.blocks_fetched) == (1, 0)


async def test_stop_ends_the_client_and_does_not_wait_for_a_master(maker: Maker, master: Master) -> None:
    async with pod(maker, master) as (engine, store):
        pid = store.link.pid
        assert pid is not None
        master.kill()
        task = asyncio.create_task(engine.prefill(request("a", 1, head=600)))
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.stop)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(EngineStopped):
            await task
