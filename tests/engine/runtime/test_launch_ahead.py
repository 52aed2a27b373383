"""Decode steps started before the tokens of the one before are known: the same answers, nothing freed too early."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.types import Request, Sampling, Token
from glm52_engine.schedule.launch_ahead import MOST_ROWS, Row, may_lease
from tests.engine.model.support import prompt
from tests.engine.runtime.content import ContentModel, LateExecutor, continuation, turn
from tests.engine.runtime.support import Maker, copy_blocks, eventually, generate, greedy, idle

READY = Row(decoding=True, greedy=True, tokens_left=2, room=1)


@pytest.mark.parametrize(
    "other",
    [
        Row(decoding=False, greedy=True, tokens_left=2, room=1),
        Row(decoding=True, greedy=False, tokens_left=2, room=1),
        Row(decoding=True, greedy=True, tokens_left=1, room=1),
        Row(decoding=True, greedy=True, tokens_left=2, room=0),
    ],
)
def test_every_row_must_be_able_to_go_on(other: Row) -> None:
    assert may_lease([[READY, READY]], arrivals=False, stopping=False)
    assert may_lease([[READY], [], [READY]], arrivals=False, stopping=False)
    for rows in itertools.permutations([READY, other]):
        assert not may_lease([rows], arrivals=False, stopping=False)
        assert not may_lease([[row] for row in rows], arrivals=False, stopping=False)


def test_nothing_is_started_beside_news_or_for_nobody() -> None:
    assert may_lease([[READY]], arrivals=False, stopping=False)
    assert not may_lease([[READY]], arrivals=True, stopping=False)
    assert not may_lease([[READY]], arrivals=False, stopping=True)
    assert not may_lease([], arrivals=False, stopping=False)
    assert not may_lease([[], []], arrivals=False, stopping=False)


def test_a_rank_with_more_rows_than_one_step_takes_waits_for_its_tokens() -> None:
    full = [READY] * MOST_ROWS
    assert may_lease([full, full], arrivals=False, stopping=False)
    assert not may_lease([[READY], [*full, READY]], arrivals=False, stopping=False)


@given(st.lists(st.builds(Row, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 3)), max_size=4))
def test_one_row_more_never_allows_what_was_refused(rows: list[Row]) -> None:
    if not may_lease([rows], arrivals=False, stopping=False) and rows:
        assert not may_lease([[*rows, READY]], arrivals=False, stopping=False)
        assert not may_lease([rows, [READY]], arrivals=False, stopping=False)


async def said(engine: LocalEngine, request: Request, source: LocalEngine) -> AsyncIterator[Token]:
    prefilled = await source.prefill(request)
    blocks = await engine.reserve(request)
    copy_blocks(source, prefilled, engine, blocks)
    source.release(request.id)
    return engine.decode(request, blocks, prefilled.token)


async def test_blocks_of_an_output_that_ended_are_kept_until_the_step_ahead_is_over(maker: Maker) -> None:
    prompts = [tuple(range(40 + n, 60 + n)) for n in range(2)]
    said_by_model = continuation(prompts[0], 6)
    end = next(token for place, token in enumerate(said_by_model) if place > 1 and token not in said_by_model[:place])
    small: dict[str, Any] = {"model": ContentModel(maker.spec.vocab_size), "max_model_len": 80, "seats": 2}
    source = maker.make(blocks=9, **small)
    # Blocks for one request: the second gets those of the first.
    target = maker.make(
        blocks=2, eos_ids=frozenset({end}), launch_ahead=True, executor=LateExecutor, prefix_cache=False, **small
    )
    source.start()
    sampling = Sampling(6, temperature=0.0)
    first = await said(target, Request("a", prompts[0], sampling), source)
    waiting = asyncio.create_task(said(target, Request("b", prompts[1], sampling), source))
    await eventually(lambda: target.stats().waiting == 1)
    tokens: list[Token] = []
    while not tokens or tokens[-1].finish is None:
        assert not waiting.done()
        turn(target)
        tokens.append(await anext(first))
    await asyncio.sleep(0)
    assert target.stats().running == 1, "the step ahead still writes to the blocks of the first one"
    turn(target)
    second = await waiting
    answer = asyncio.create_task(_all(second))
    while not answer.done():
        turn(target)
        await asyncio.sleep(0)
    assert [token.id for token in answer.result()] == continuation(prompts[1], 6)[1:]
    assert idle(target)
    source.stop()


async def _all(tokens: AsyncIterator[Token]) -> list[Token]:
    return [token async for token in tokens]


async def test_outputs_are_the_same_under_churn(maker: Maker) -> None:
    """Requests of every kind come and go; some are left by their clients, some end by a token."""
    requests = [
        greedy(f"r{n}", tuple(prompt(3 + 7 * n, seed=n)), 5 + 3 * n, ignore_eos=n % 2 == 0, **more)
        for n, more in enumerate(
            [{}, {}, {"temperature": 0.8, "seed": 4}, {}, {"repetition_penalty": 1.3}, {"logprobs": 2}, {}, {}]
        )
    ]

    async def leave(source: LocalEngine, target: LocalEngine, request: Request, after: int) -> None:
        tokens = await said(target, request, source)
        for _ in range(after):
            await anext(tokens)
        await tokens.aclose()  # type: ignore[attr-defined]

    async def run(**options: Any) -> list[list[tuple[int, str | None]]]:
        async with maker.running() as source, maker.running(ranks=2, seats=3, **options) as target:
            gone = [leave(source, target, greedy(f"x{n}", tuple(prompt(9 + n)), 40), n) for n in range(1, 6)]
            answers, _ = await asyncio.gather(
                asyncio.gather(*(generate(source, target, request) for request in requests)), asyncio.gather(*gone)
            )
            await eventually(lambda: idle(target))
            ahead = sum(rank.counters.steps_ahead for rank in target._ranks)
            assert (ahead > 0) == options.get("launch_ahead", False)
            return [[(token.id, token.finish) for token in answer] for answer in answers]

    assert await run(launch_ahead=True) == await run()
