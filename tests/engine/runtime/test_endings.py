"""Whatever ends a request, and whenever: its seat and its blocks come back."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import pytest

from glm52_engine.runtime.engine import EngineStopped, LocalEngine
from glm52_engine.runtime.types import Request, Token
from tests.engine.model.support import prompt
from tests.engine.runtime.content import ContentModel, continuation
from tests.engine.runtime.support import Maker, eventually, greedy, hand_over, idle

LONG = 400


class Gate:
    """A model whose forward waits until it is opened, to hold a rank in the middle of a step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.open = threading.Event()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def forward(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        return self._model.forward(*arguments)


async def decoding(engine: LocalEngine, request: Request) -> Any:
    return engine.decode(request, await engine.reserve(request), Token(65, 0))


async def test_a_closed_stream(maker: Maker) -> None:
    async with maker.running() as engine:
        stream = await decoding(engine, greedy("r", tuple(prompt(5)), LONG, ignore_eos=True))
        assert (await anext(stream)).index == 1
        await stream.aclose()
        await stream.aclose()
        assert [token async for token in stream] == []
        await eventually(lambda: idle(engine))


async def test_a_stream_closed_before_its_first_token(maker: Maker) -> None:
    async with maker.running() as engine:
        stream = await decoding(engine, greedy("r", tuple(prompt(5)), LONG, ignore_eos=True))
        await stream.aclose()
        await eventually(lambda: idle(engine))


async def test_a_dropped_stream(maker: Maker) -> None:
    async with maker.running() as engine:
        stream = await decoding(engine, greedy("r", tuple(prompt(5)), LONG, ignore_eos=True))
        await anext(stream)
        del stream
        gc.collect()
        await eventually(lambda: idle(engine))


async def test_a_cancelled_consumer(maker: Maker) -> None:
    gate = Gate(maker.model)
    async with maker.running(model=gate) as engine:
        stream = await decoding(engine, greedy("r", tuple(prompt(5)), LONG))
        consumer = asyncio.ensure_future(anext(stream))
        await eventually(gate.entered.is_set)
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert not idle(engine), "the rank is still writing into these blocks"
        # The id can be used again at once, although the rank still has the old sequence.
        again = asyncio.ensure_future(engine.reserve(greedy("r", tuple(prompt(5)), 5)))
        await eventually(lambda: again.done())
        gate.open.set()
        engine.release("r")
        await eventually(lambda: idle(engine))


async def test_release_of_a_running_decode_ends_its_stream(maker: Maker) -> None:
    async with maker.running() as engine:
        stream = await decoding(engine, greedy("r", tuple(prompt(5)), LONG, ignore_eos=True))
        await anext(stream)
        engine.release("r")
        rest = [token async for token in stream]
        assert rest[-1].finish == "abort"
        engine.release("r")
        engine.release("unknown")
        await eventually(lambda: idle(engine))


async def test_a_cancelled_wait_leaves_the_queue(maker: Maker) -> None:
    async with maker.running(seats=1) as engine:
        first = await engine.reserve(greedy("a", tuple(prompt(5)), 5))
        waiting = asyncio.ensure_future(engine.reserve(greedy("b", tuple(prompt(5)), 5)))
        behind = asyncio.ensure_future(engine.prefill(greedy("c", tuple(prompt(5)), 5)))
        await eventually(lambda: engine.stats().waiting == 2)
        waiting.cancel()
        await eventually(lambda: engine.stats().waiting == 1)
        engine.release("a")
        assert (await behind).blocks.rank == first.rank
        engine.release("c")
        assert idle(engine)


async def test_a_result_that_nobody_took_is_freed(maker: Maker) -> None:
    """The seat is granted in the same turn of the loop in which the caller is cancelled."""
    async with maker.running(seats=1) as engine:
        await engine.reserve(greedy("a", tuple(prompt(5)), 5))
        waiting = asyncio.ensure_future(engine.reserve(greedy("b", tuple(prompt(5)), 5)))
        await eventually(lambda: engine.stats().waiting == 1)
        engine.release("a")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert idle(engine)


async def test_a_prefill_cancelled_in_the_middle_of_a_step(maker: Maker) -> None:
    gate = Gate(maker.model)
    async with maker.running(model=gate) as engine:
        call = asyncio.ensure_future(engine.prefill(greedy("r", tuple(prompt(100)), 5)))
        await eventually(gate.entered.is_set)
        assert engine.seconds_without_progress() > 0
        call.cancel()
        gate.open.set()
        await eventually(lambda: idle(engine))
        await eventually(lambda: engine.seconds_without_progress() == 0)


@pytest.mark.parametrize("seed", range(3))
async def test_ends_at_random_moments(maker: Maker, seed: int) -> None:
    """Cancel or release requests in whatever state they are in; nothing may be lost or freed twice."""
    rng = random.Random(seed)

    async def whole(source: LocalEngine, target: LocalEngine, name: str) -> None:
        request = greedy(name, tuple(prompt(rng.randrange(1, 90), seed)), 12, ignore_eos=True)
        try:
            blocks, first = await hand_over(source, target, request)
            async for _ in target.decode(request, blocks, first):
                pass
        finally:
            source.release(name)
            target.release(name)

    async with maker.running(seats=3, blocks=24) as source, maker.running(ranks=2, seats=2, blocks=16) as target:
        tasks = [asyncio.ensure_future(whole(source, target, f"r{n}")) for n in range(16)]
        for task in rng.sample(tasks, 11):
            for _ in range(rng.randrange(200)):
                await asyncio.sleep(0)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        await eventually(lambda: idle(source) and idle(target))


@pytest.mark.parametrize("seed", range(3))
async def test_blocks_that_an_end_sets_free_are_written_by_their_next_owner_alone(maker: Maker, seed: int) -> None:
    """A pool for two requests: whoever comes next gets the blocks of one that ended by length, by a stop token, by its
    client or by the router, mostly in the middle of a step. A row that is written too late changes what is said."""
    rng = random.Random(seed)
    model = ContentModel(maker.spec.vocab_size)
    small: dict[str, Any] = {"model": model, "eos_ids": frozenset(), "max_model_len": 48}
    wrong: list[str] = []

    async def life(source: LocalEngine, target: LocalEngine, number: int) -> None:
        ids = tuple(prompt(rng.randrange(1, 24), 100 * seed + number))
        said, leaves = continuation(ids, 12), rng.randrange(1, 12)
        how = rng.choice(["length", "stop token", "close", "release"])
        stops = frozenset({said[leaves]}) if how == "stop token" else frozenset()
        request = greedy(f"r{number}", ids, 12, stop_token_ids=stops)
        blocks, first = await hand_over(source, target, request)
        found, stream = [first.id], target.decode(request, blocks, first)
        async for token in stream:
            if token.finish == "abort":
                break
            found.append(token.id)
            if len(found) > leaves and how == "close":
                await stream.aclose()  # type: ignore[attr-defined]
            elif len(found) > leaves and how == "release":
                target.release(request.id)
        whole = said[: said.index(said[leaves]) + 1] if stops else said
        if found != whole[: len(found)] or (how in ("length", "stop token") and len(found) < len(whole)):
            wrong.append(f"{how}: said {found}, not {whole}")

    async with maker.running(**small) as source, maker.running(seats=3, blocks=6, **small) as target:
        await asyncio.gather(*(life(source, target, number) for number in range(40)))
        assert wrong == []
        assert target.failure() is None
        await eventually(lambda: idle(source) and idle(target))


async def test_stop_ends_everything(maker: Maker) -> None:
    engine = maker.make(seats=1)
    engine.start()
    stream = await decoding(engine, greedy("a", tuple(prompt(5)), LONG, ignore_eos=True))
    waiting = asyncio.ensure_future(engine.reserve(greedy("b", tuple(prompt(5)), 5)))
    await anext(stream)
    engine.stop()
    assert [token async for token in stream][-1].finish == "abort"
    with pytest.raises(EngineStopped):
        await waiting
    with pytest.raises(EngineStopped):
        await engine.reserve(greedy("c", tuple(prompt(5)), 5))
    assert (engine.failure(), list(engine.pools)) == (None, [])
    engine.stop()


async def test_a_rank_that_dies_is_reported_and_nobody_waits_for_it(maker: Maker) -> None:
    gate = Gate(maker.model)
    gate.error = ValueError("broken")
    gate.open.set()
    async with maker.running(model=gate, seats=1) as engine:
        stream = await decoding(engine, greedy("a", tuple(prompt(5)), LONG))
        waiting = asyncio.ensure_future(engine.reserve(greedy("b", tuple(prompt(5)), 5)))
        assert [token.finish async for token in stream] == ["abort"]
        with pytest.raises(EngineStopped):
            await waiting
        assert engine.failure() is gate.error
        with pytest.raises(EngineStopped) as refused:
            await engine.prefill(greedy("c", tuple(prompt(5)), 5))
        assert refused.value.__cause__ is gate.error
