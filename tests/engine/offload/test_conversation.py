"""A conversation through a real store: what prefill and decode have computed of a turn, the next one finds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from glm52_engine.offload.store import PrefixStore
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.types import Request, Token
from tests.engine.model.support import prompt
from tests.engine.offload.conftest import Master, in_time
from tests.engine.offload.test_shared import pod
from tests.engine.runtime.support import BLOCK, Maker, copy_blocks, generate, greedy, idle

OUTPUT = 2 * BLOCK


def turn(name: str, before: tuple[int, ...], seed: int, own: int = 21, **sampling: Any) -> Request:
    return greedy(name, (*before, *prompt(own, seed=seed)), OUTPUT, ignore_eos=True, **sampling)


@asynccontextmanager
async def decoding(maker: Maker, master: Master, **options: Any) -> AsyncIterator[tuple[LocalEngine, PrefixStore]]:
    async with pod(maker, master, prefix_cache=False, **options) as made:
        yield made


@pytest.mark.parametrize("ranks", [1, 2])
async def test_the_second_turn_computes_only_what_is_new(maker: Maker, master: Master, ranks: int) -> None:
    first = turn("a", (), 700)
    async with maker.running(prefix_cache=False) as plain, maker.running(prefix_cache=False) as other:
        said = [token.id for token in await generate(plain, other, first)]
        second = turn("b", (*first.prompt, *said), 701, own=5)
        expected = [token.id for token in await generate(plain, other, second)]
        async with (
            pod(maker, master) as (one, saved),
            pod(maker, master) as (two, fetched),
            decoding(maker, master, ranks=ranks) as (target, kept),
        ):
            assert [token.id for token in await generate(one, target, first)] == said
            whole = (len(first.prompt) + OUTPUT - 1) // BLOCK
            # Either may be the first with the prompt's block.
            await in_time(
                lambda: saved.counters.blocks_saved + kept.counters.blocks_saved >= whole and idle(one) and idle(target)
            )
            # Another pod than the one that had the first turn.
            assert [token.id for token in await generate(two, target, second)] == expected
            assert two.stats().prompt_tokens_computed == len(second.prompt) - whole * BLOCK
            assert fetched.counters.blocks_fetched == whole
            assert kept.counters.blocks_fetched == 0
            await in_time(lambda: idle(two) and idle(target))


async def test_a_decode_saves_the_prompt_too_where_the_prefill_that_had_it_is_gone(
    maker: Maker, master: Master
) -> None:
    first = turn("a", (), 710)
    async with maker.running() as lonely, decoding(maker, master) as (target, kept):
        said = [token.id for token in await generate(lonely, target, first)]
        whole = (len(first.prompt) + OUTPUT - 1) // BLOCK
        await in_time(lambda: kept.counters.blocks_saved == whole and idle(target))
        async with pod(maker, master) as (one, _):
            second = turn("b", (*first.prompt, *said), 711, own=5)
            assert (await one.prefill(second)).cached_tokens == whole * BLOCK
            one.release("b")


async def test_kv_of_another_kind_is_not_found(maker: Maker, master: Master) -> None:
    first = turn("a", (), 720)
    async with (
        maker.running(kv_cache_dtype="fp8") as source,
        decoding(maker, master, kv_cache_dtype="fp8") as (target, kept),
        pod(maker, master) as (one, fetched),
        pod(maker, master, kv_cache_dtype="fp8") as (alike, _),
    ):
        said = [token.id for token in await generate(source, target, first)]
        await in_time(lambda: kept.counters.blocks_saved > 0 and idle(target))
        second = turn("b", (*first.prompt, *said), 721, own=5)
        assert (await one.prefill(second)).cached_tokens == 0
        assert fetched.counters.blocks_fetched == 0
        # It was there, for those who can read it.
        assert (await alike.prefill(second)).cached_tokens == (len(first.prompt) + OUTPUT - 1) // BLOCK * BLOCK
        one.release("b")
        alike.release("b")


async def test_a_store_that_is_lost_holds_no_answer_up(maker: Maker, master: Master) -> None:
    first = turn("a", (), 730)
    async with (
        maker.running(prefix_cache=False) as plain,
        maker.running(prefix_cache=False) as other,
        decoding(maker, master) as (target, kept),
    ):
        said = [token.id for token in await generate(plain, other, first)]
        prefilled = await plain.prefill(first)
        blocks = await target.reserve(first)
        copy_blocks(plain, prefilled, target, blocks)
        plain.release("a")
        tokens: list[Token] = [prefilled.token]
        async for token in target.decode(first, blocks, prefilled.token):
            tokens.append(token)
            if len(tokens) == BLOCK:
                master.kill()
        assert [token.id for token in tokens] == said
        await in_time(lambda: idle(target) and not kept.counters.up)
        assert kept.counters.blocks_saved == 0
