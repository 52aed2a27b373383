"""Prompts that begin alike: computed once, shared, and never the worse for it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from glm52_engine.runtime import engine as engine_module
from glm52_engine.runtime.types import EngineBusy, Prefilled, Request, Token
from tests.engine.model.support import TOLERANCE, prompt
from tests.engine.runtime.content import ContentModel, turn
from tests.engine.runtime.support import BLOCK, Maker, copy_blocks, eventually, generate, greedy, idle

HEAD = tuple(prompt(5 * BLOCK, seed=9))


class Recorder:
    """Keeps the logits of every step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logits: list[torch.Tensor] = []

    def forward(self, *arguments: Any) -> torch.Tensor:
        self.logits.append(self._model.forward(*arguments))
        return self.logits[-1]


def ids(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


@pytest.mark.parametrize("own", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 40])
async def test_hits_change_neither_logits_nor_tokens(maker: Maker, own: int) -> None:
    request = greedy("r", (*HEAD, *prompt(own, seed=own)), 10, ignore_eos=True)
    plain, cached = Recorder(maker.model), Recorder(maker.model)
    async with maker.running(model=plain, prefix_cache=False) as source, maker.running() as target:
        expected = await generate(source, target, request)
        assert source.stats().prefix_cache_queries == 0
    async with maker.running(model=cached) as source, maker.running() as target:
        await source.prefill(greedy("before", (*HEAD, *prompt(33, seed=77)), 5))
        prefilled = await source.prefill(request)
        assert prefilled.cached_tokens == min(len(HEAD), BLOCK * ((len(request.prompt) - 1) // BLOCK))
        assert prefilled.computed_tokens == len(request.prompt) - prefilled.cached_tokens > 0
        stats = source.stats()
        assert (stats.prefix_cache_hits, stats.prefix_cache_queries) == (
            prefilled.cached_tokens,
            len(HEAD) + 33 + len(request.prompt),
        )
        # The one that came before goes; what it shared stays.
        source.release("before")
        blocks = await target.reserve(request)
        copy_blocks(source, prefilled, target, blocks)
        source.release("r")
        tokens = [prefilled.token] + [token async for token in target.decode(request, blocks, prefilled.token)]
        assert idle(source)
    assert ids(tokens) == ids(expected)
    assert (plain.logits[-1] - cached.logits[-1]).abs().max() < TOLERANCE


async def test_kv_that_a_peer_may_still_read_survives_releases_and_evictions(maker: Maker) -> None:
    async with maker.running(blocks=12) as source, maker.running() as target:
        request = greedy("kept", (*HEAD, 65), 10, ignore_eos=True)
        expected = await generate(source, target, request)
        first = await source.prefill(greedy("twin", (*HEAD, 66), 10))
        held = await source.prefill(request)
        assert held.blocks.ids[:5] == first.blocks.ids[:5]
        source.release("twin")
        for n in range(4):  # each needs all that is free, so what is cached and free is evicted
            await source.prefill(greedy("other", tuple(prompt(6 * BLOCK, seed=n)), 5))
            source.release("other")
        blocks = await target.reserve(request)
        copy_blocks(source, held, target, blocks)
        tokens = [held.token] + [token async for token in target.decode(request, blocks, held.token)]
        assert ids(tokens) == ids(expected)
        source.release("kept")
        assert idle(source)


async def test_what_is_not_shared(maker: Maker) -> None:
    async def found(request: Request) -> int:
        prefilled = await engine.prefill(request)
        engine.release(request.id)
        return prefilled.cached_tokens

    async with maker.running() as engine:
        salted = Request("s", (*HEAD, 1), greedy("s", (1,), 5).sampling, cache_salt="a tenant")
        assert [await found(greedy("r", (*HEAD, n), 5)) for n in (1, 2)] == [0, len(HEAD)]
        assert [await found(salted), await found(salted)] == [0, len(HEAD)]
        changed = (*HEAD[: 2 * BLOCK], HEAD[2 * BLOCK] ^ 1, *HEAD[2 * BLOCK + 1 :], 1)
        assert await found(greedy("r", changed, 5)) == 2 * BLOCK
        shorter = HEAD[: 2 * BLOCK]
        assert await found(greedy("r", shorter, 5)) == BLOCK, "the last token is computed, and with it its block"
        assert await found(greedy("r", shorter[:-1], 5)) == BLOCK, "a block that is not full is nobody's"


async def test_a_prompt_given_up_half_way_leaves_what_it_had_computed(maker: Maker) -> None:
    engine = maker.make(model=ContentModel(maker.spec.vocab_size), step_tokens=2 * BLOCK + 3)
    call = asyncio.ensure_future(engine.prefill(greedy("a", (*HEAD, 1), 5)))
    await asyncio.sleep(0)
    turn(engine)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    turn(engine)
    await eventually(lambda: idle(engine))
    again = asyncio.ensure_future(engine.prefill(greedy("a", (*HEAD, 1), 5)))
    while not again.done():
        turn(engine)
        await asyncio.sleep(0)
    assert again.result().cached_tokens == 2 * BLOCK
    engine.release("a")
    assert idle(engine)


async def test_a_prompt_finds_what_is_computed_of_one_that_still_runs(maker: Maker) -> None:
    engine = maker.make(model=ContentModel(maker.spec.vocab_size), step_tokens=2 * BLOCK + 3)
    first = asyncio.ensure_future(engine.prefill(greedy("a", (*HEAD, 1), 5)))
    await asyncio.sleep(0)
    turn(engine)
    await asyncio.sleep(0)
    second = asyncio.ensure_future(engine.prefill(greedy("b", (*HEAD, 2), 5)))
    while not (first.done() and second.done()):
        await asyncio.sleep(0)
        turn(engine)
    assert (first.result().cached_tokens, second.result().cached_tokens) == (0, 2 * BLOCK)
    engine.release("a")
    engine.release("b")
    assert idle(engine)


class Broken(ContentModel):
    """Its logits are no numbers while it is `broken`."""

    broken = False

    def forward(self, step: Any, pool: Any) -> torch.Tensor:
        logits = super().forward(step, pool)
        return logits * torch.nan if self.broken else logits


async def test_a_failed_request_takes_what_it_shared_out_of_the_cache(maker: Maker) -> None:
    """Or one bad block would fail every prompt that begins like it, for as long as they keep coming."""
    model = Broken(maker.spec.vocab_size)
    async with maker.running(model=model) as engine:
        found = []
        for name, broken in (("a", False), ("b", True), ("c", False), ("d", False)):
            model.broken = broken
            prefilled = await engine.prefill(greedy(name, (*HEAD, *name.encode()), 5))
            assert (prefilled.token.finish == "error") == broken
            found.append(prefilled.cached_tokens)
            engine.check_integrity()
        assert found == [0, len(HEAD), 0, len(HEAD)]
        for name in "abcd":
            engine.release(name)
        assert idle(engine)


async def finished(maker: Maker, requests: list[Request], **options: Any) -> list[str]:
    """Ids in the order in which their prefills end, all having arrived at once."""
    engine = maker.make(model=ContentModel(maker.spec.vocab_size), **options)
    order: list[str] = []

    async def one(request: Request) -> None:
        await engine.prefill(request)
        order.append(request.id)
        engine.release(request.id)

    tasks = [asyncio.ensure_future(one(request)) for request in requests]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn(engine)
    assert idle(engine)
    return order


async def test_short_prompts_do_not_wait_for_a_long_one(maker: Maker) -> None:
    requests = [
        greedy("long", tuple(prompt(480)), 5),
        *(greedy(f"s{n}", tuple(prompt(20, seed=n)), 5) for n in (1, 2, 3, 4)),
    ]
    assert await finished(maker, requests, step_tokens=40) == ["s1", "s2", "s3", "s4", "long"]


async def test_the_queue_goes_by_priority_then_arrival(maker: Maker) -> None:
    sampling = greedy("r", (1,), 5).sampling
    requests = [
        Request(f"{n}{priority:+}", tuple(prompt(20, seed=n)), sampling, priority)
        for n, priority in enumerate((0, 5, 0, -3, -3))
    ]
    assert await finished(maker, requests, seats=1) == ["0+0", "3-3", "4-3", "2+0", "1+5"]


async def test_a_full_queue_refuses_and_says_when_to_come_again(maker: Maker) -> None:
    async with maker.running(seats=1, max_waiting=2) as engine:
        request = [greedy(f"r{n}", tuple(prompt(20, seed=n)), 5) for n in range(4)]
        await engine.reserve(request[0])
        waiting = [asyncio.ensure_future(engine.reserve(each)) for each in request[1:3]]
        await eventually(lambda: engine.stats().waiting == 2)
        with pytest.raises(EngineBusy, match="2 requests wait already and no more than 2 may") as refused:
            await engine.reserve(request[3])
        assert refused.value.retry_after == 5
        engine.release("r0")
        await waiting[0]
        assert engine.stats().waiting == 1
        late = asyncio.ensure_future(engine.reserve(request[3]))
        await eventually(lambda: engine.stats().waiting == 2)
        for each in request:
            engine.release(each.id)
        await asyncio.gather(*waiting, late, return_exceptions=True)
        assert idle(engine)


async def test_prefills_that_run_at_once_do_not_share_what_is_not_computed_yet(maker: Maker) -> None:
    async with maker.running() as engine:
        both: list[Prefilled] = await asyncio.gather(
            *(engine.prefill(greedy(f"r{n}", (*HEAD, n), 5)) for n in range(2))
        )
        assert not {*both[0].blocks.ids} & {*both[1].blocks.ids}
        assert (await engine.prefill(greedy("r2", (*HEAD, 2), 5))).cached_tokens == len(HEAD)
        for n in range(3):
            engine.release(f"r{n}")
        assert idle(engine)


async def test_a_long_prompt_is_checked_and_keyed_off_the_event_loop(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def noted(name: str) -> None:
        real = getattr(engine_module, name)

        def work(*arguments: Any, **named: Any) -> Any:
            threads.append(threading.current_thread() is threading.main_thread())
            return real(*arguments, **named)

        monkeypatch.setattr(engine_module, name, work)

    noted("check_request")
    noted("prefix_keys")
    monkeypatch.setattr(engine_module, "LONG_PROMPT", len(HEAD))
    async with maker.running() as engine:
        for name, request in (("short", HEAD[:-1]), ("long", HEAD), ("again", HEAD)):
            prefilled = await engine.prefill(greedy(name, request, 5))
            engine.release(name)
        assert threads == [True, True, False, False, False, False]
        await engine.reserve(greedy("seat", HEAD, 5))
        engine.release("seat")
        assert threads[6:] == [False]
        assert prefilled.cached_tokens == len(HEAD) - BLOCK
        assert idle(engine)
