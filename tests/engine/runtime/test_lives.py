"""Requests that share prefixes, ended at any moment: books that always balance, and KV that is always the prompt's.

With launch-ahead and without: a step under way computes as late as it may, when its tokens are asked for, so that
blocks which were given to somebody else too early are written by both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.types import Blocks, Prefilled, Request, Sampling, Token
from tests.engine.runtime.content import LETTERS, ContentModel, LateExecutor, continuation, stored, turn
from tests.engine.runtime.support import BLOCK, Maker, copy_blocks, idle

HEADS = tuple(tuple(range(start, start + 3 * BLOCK)) for start in (30, 100))
OUTPUT = 6
END = LETTERS[5]


@dataclass
class Life:
    """One request through both engines."""

    request: Request
    prefill: asyncio.Task[Prefilled]
    seat: asyncio.Task[Blocks] | None = None
    said: asyncio.Task[list[Token]] | None = None


async def said(engine: LocalEngine, request: Request, blocks: Blocks, first: Token) -> list[Token]:
    return [token async for token in engine.decode(request, blocks, first)]


def expected(request: Request) -> list[int]:
    """What is said after the prompt, up to the end."""
    tokens = continuation(request.prompt, OUTPUT)
    ends = [] if request.sampling.ignore_eos else [place for place, token in enumerate(tokens) if token == END]
    return tokens[: ends[0] + 1] if ends else tokens


class Lives(RuleBasedStateMachine):
    maker: Maker
    launch_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        model = ContentModel(self.maker.spec.vocab_size)
        small: dict[str, Any] = {"model": model, "max_model_len": 80, "step_tokens": 24, "eos_ids": frozenset({END})}
        if self.launch_ahead:
            small |= {"launch_ahead": True, "executor": LateExecutor}
        self.source = self.maker.make(ranks=2, seats=2, blocks=9, max_waiting=4, **small)
        self.target = self.maker.make(ranks=1, seats=3, blocks=12, prefix_cache=False, **small)
        self.lives: dict[str, Life] = {}
        self.count = 0

    def task(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(work)  # type: ignore[arg-type]

    def settle(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    def pick(self, data: st.DataObject, states: str) -> Life:
        return data.draw(st.sampled_from([life for life in self.lives.values() if self.state(life) in states.split()]))

    def some(self, states: str) -> bool:
        return any(self.state(life) in states.split() for life in self.lives.values())

    @staticmethod
    def state(life: Life) -> str:
        if life.said is not None:
            return "decoding"
        if life.seat is not None:
            return "seated" if life.seat.done() else "queued"
        return "held" if life.prefill.done() else "computing"

    @rule(
        head=st.sampled_from(HEADS), shared=st.integers(0, 3 * BLOCK), own=st.integers(1, 20),
        priority=st.integers(-1, 1), salt=st.sampled_from(["", "", "x"]), ignore_eos=st.booleans(),
    )  # fmt: skip
    def arrive(self, head: tuple[int, ...], shared: int, own: int, priority: int, salt: str, ignore_eos: bool) -> None:
        self.count += 1
        name = f"r{self.count}"
        prompt = (*head[:shared], *(200 + (self.count + n) % 50 for n in range(own)))
        sampling = Sampling(OUTPUT, temperature=0.0, ignore_eos=ignore_eos)
        request = Request(name, prompt, sampling, priority=priority, cache_salt=salt)
        life = Life(request, self.task(self.source.prefill(request)))
        self.settle()
        if life.prefill.done():
            assert "wait already" in str(life.prefill.exception())
        else:
            self.lives[name] = life

    @rule()
    def compute(self) -> None:
        turn(self.source)
        self.settle()
        for life in self.lives.values():
            if life.prefill.done():
                prefilled, prompt = life.prefill.result(), life.request.prompt
                assert prefilled.token.id == continuation(prompt, 1)[0]
                assert prefilled.computed_tokens + prefilled.cached_tokens == len(prompt)
                assert prefilled.computed_tokens > 0

    @precondition(lambda self: self.some("held"))
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        life = self.pick(data, "held")
        life.seat = self.task(self.target.reserve(life.request))
        self.settle()

    @precondition(lambda self: self.some("seated"))
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        life = self.pick(data, "seated")
        assert life.seat is not None
        prefilled, blocks = life.prefill.result(), life.seat.result()
        copy_blocks(self.source, prefilled, self.target, blocks)
        self.source.release(life.request.id)
        life.said = self.task(said(self.target, life.request, blocks, prefilled.token))
        self.settle()

    @rule()
    def decode(self) -> None:
        turn(self.target)
        self.settle()
        for name, life in list(self.lives.items()):
            if life.said is not None and life.said.done():
                assert [token.id for token in life.said.result()] == expected(life.request)[1:]
                del self.lives[name]

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "release"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        life = self.pick(data, "computing held queued seated decoding")
        del self.lives[life.request.id]
        self.end(life, how)
        self.settle()

    def end(self, life: Life, how: str) -> None:
        last = life.said or life.seat or life.prefill
        if how == "cancel":
            last.cancel()
        if how == "release" or last.done():
            self.target.release(life.request.id)
        self.source.release(life.request.id)
        self.settle()
        if last.done() and not last.cancelled():
            last.exception()

    @invariant()
    def books_balance(self) -> None:
        self.source.check_integrity()
        self.target.check_integrity()

    @invariant()
    def kv_that_a_peer_may_read_is_the_prompts(self) -> None:
        for life in self.lives.values():
            if self.state(life) in ("held", "queued", "seated"):
                blocks, prompt = life.prefill.result().blocks, life.request.prompt
                assert stored(self.source.pools[blocks.rank], blocks.ids, len(prompt)) == list(prompt)

    def teardown(self) -> None:
        for life in self.lives.values():
            self.end(life, "cancel")
        # One turn applies the aborts; one before it ends the step under way, which may have been started for nobody.
        for engine in (self.source, self.target) * 2:
            turn(engine)
            self.settle()
        assert idle(self.source), self.source.stats()
        assert idle(self.target), self.target.stats()
        self.loop.close()


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_lives(maker: Maker, launch_ahead: bool) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        type("LivesOfMaker", (Lives,), {"maker": maker, "launch_ahead": launch_ahead}),
        settings=settings(max_examples=25, stateful_step_count=40, deadline=None),
    )


@pytest.mark.parametrize("engine_keeps", [True, False])
async def test_the_content_model_notices_a_wrong_block(maker: Maker, engine_keeps: bool) -> None:
    """The control: rows of another prompt in a shared block change what is said."""
    engine: LocalEngine = maker.make(model=ContentModel(maker.spec.vocab_size), prefix_cache=engine_keeps)
    engine.start()
    try:
        prompt = HEADS[0]
        first = await engine.prefill(Request("a", prompt, Sampling(OUTPUT, temperature=0.0)))
        engine.release("a")
        engine.pools[0].mla[0][first.blocks.ids[0], 3, 0] += 1  # type: ignore[attr-defined]
        second = await engine.prefill(Request("b", prompt, Sampling(OUTPUT, temperature=0.0)))
        assert (second.token.id != first.token.id) == engine_keeps
        engine.release("b")
    finally:
        engine.stop()
