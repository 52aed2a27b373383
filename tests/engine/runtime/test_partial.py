"""What can be read of a prompt while it is computed, and seats that are taken before there is anything to decode."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from glm52_engine.model import Span
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.executor import EagerWork, HostExecutor
from glm52_engine.runtime.landed import Landed, Landings
from glm52_engine.runtime.types import Blocks, EngineBusy, Prefilled
from tests.engine.runtime.support import BLOCK, Maker, copy_blocks, eventually, generate, greedy, idle

PROMPT = tuple(range(3, 3 + 5 * BLOCK))
STEP = 2 * BLOCK


class Gated(HostExecutor):
    """Computes a step for every release of `gate`; its copies have arrived when `there` says so."""

    gate = threading.Semaphore(0)
    there = True

    def launch(self, spans: Sequence[Span]) -> EagerWork:
        assert self.gate.acquire(timeout=30)
        return super().launch(spans)

    def landed(self) -> Landed:
        return lambda: type(self).there


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    monkeypatch.setattr(Gated, "gate", threading.Semaphore(0))
    monkeypatch.setattr(Gated, "there", True)
    yield Gated.gate
    Gated.gate.release(1000)


def kept(engine: LocalEngine, request_id: str) -> int:
    partial = engine.partial(request_id)
    return partial.kept if partial else -1


async def test_what_was_read_chunk_by_chunk_is_what_is_there_at_the_end(
    tiny_checkpoint: Path, gate: threading.Semaphore
) -> None:
    maker = Maker(tiny_checkpoint)
    request = greedy("r", PROMPT, 6, ignore_eos=True)
    async with maker.running(prefix_cache=False) as source, maker.running() as target:
        wanted = [token.id for token in await generate(source, target, request)]
    options = {"step_tokens": STEP, "executor": Gated}
    async with maker.running(**options) as source, maker.running() as target:
        into = await target.reserve(replace(greedy("r", PROMPT, 6), priority=3), wait=False)
        computing = asyncio.create_task(source.prefill(request))
        here = 0
        for step in (1, 2):
            await eventually(lambda: source.partial("r") is not None)
            gate.release()
            await eventually(lambda count=step * STEP: kept(source, "r") == count)  # type: ignore[misc]
            partial = source.partial("r")
            assert partial is not None
            assert partial.request.prompt == PROMPT
            assert partial.blocks is not None
            there = partial.blocks
            here = _copy(source, there, target, into, here, partial.kept // BLOCK)
        gate.release()
        prefilled = await computing
        assert source.partial("r") is None, "it is held now, and another's business"
        assert prefilled.blocks == there
        _copy(source, prefilled.blocks, target, into, here, len(prefilled.blocks.ids))
        # What only the call that continues it knows is taken from there.
        tokens = [prefilled.token.id] + [token.id async for token in target.decode(request, into, prefilled.token)]
        assert tokens == wanted
        source.release("r")
        await eventually(lambda: idle(source) and idle(target))


def _copy(source: LocalEngine, theirs: Blocks, target: LocalEngine, ours: Blocks, first: int, end: int) -> int:
    part = [Blocks(blocks.rank, blocks.ids[first:end]) for blocks in (theirs, ours)]
    copy_blocks(source, Prefilled(None, part[0], 0), target, part[1])  # type: ignore[arg-type]
    return end


async def test_nothing_is_there_before_a_device_has_copied_it(
    tiny_checkpoint: Path, gate: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gated, "there", False)
    async with Maker(tiny_checkpoint).running(step_tokens=STEP, executor=Gated) as engine:
        computing = asyncio.create_task(engine.prefill(greedy("r", PROMPT, 6)))
        await eventually(lambda: kept(engine, "r") == 0)
        gate.release()
        await eventually(lambda: engine.stats().steps == 1)
        await eventually(lambda: STEP in engine._ledger.computed.values())
        assert kept(engine, "r") == 0
        monkeypatch.setattr(Gated, "there", True)
        assert kept(engine, "r") == STEP
        gate.release(2)
        await computing
        engine.release("r")
        await eventually(lambda: idle(engine))
        assert not engine._ledger.computed


async def test_a_prompt_that_waits_has_no_blocks_and_one_that_is_unknown_is_nothing(
    tiny_checkpoint: Path,
) -> None:
    async with Maker(tiny_checkpoint).running(seats=1) as engine:
        await engine.reserve(greedy("seated", (1, 2), 2))
        waits = asyncio.create_task(engine.prefill(greedy("waits", (1, 2), 2)))
        await eventually(lambda: engine.stats().waiting == 1)
        partial = engine.partial("waits")
        assert partial is not None
        assert (partial.blocks, partial.kept) == (None, 0)
        assert engine.partial("seated") is None
        assert engine.partial("unknown") is None
        engine.release("seated")
        await waits
        engine.release("waits")


async def test_a_seat_that_is_not_free_is_not_waited_for(tiny_checkpoint: Path) -> None:
    async with Maker(tiny_checkpoint).running(seats=1) as engine:
        await engine.reserve(greedy("seated", (1, 2), 2), wait=False)
        with pytest.raises(EngineBusy, match="would have to wait"):
            await engine.reserve(greedy("next", (1, 2), 2), wait=False)
        engine.check_integrity()
        assert engine.stats().waiting == 0
        engine.release("seated")
        await engine.reserve(greedy("next", (1, 2), 2), wait=False)
        engine.release("next")
        assert idle(engine)


async def test_blocks_that_were_reserved_for_another_prompt_are_not_decoded(tiny_checkpoint: Path) -> None:
    async with Maker(tiny_checkpoint).running() as source, Maker(tiny_checkpoint).running() as target:
        prefilled = await source.prefill(greedy("r", (1, 2, 3), 4))
        blocks = await target.reserve(greedy("r", (1, 2, 4), 4))
        with pytest.raises(ValueError, match="the prompt for which"):
            target.decode(greedy("r", (1, 2, 3), 4), blocks, prefilled.token)
        target.release("r")
        source.release("r")


def test_copies_count_in_their_order_and_only_as_far_as_they_are_done() -> None:
    landings, done = Landings(), {1: False, 2: False}
    assert landings.tokens("a", 0, lambda: lambda: True) == 0
    assert landings.tokens("a", 10, lambda: lambda: done[1]) == 0
    assert landings.tokens("a", 20, lambda: lambda: done[2]) == 0
    done[1] = True
    assert landings.tokens("a", 20, lambda: lambda: True) == 10, "no second mark for what has one"
    done[2] = True
    assert landings.tokens("a", 20, lambda: lambda: False) == 20
    assert landings.tokens("a", 20, lambda: lambda: False) == 20
    landings.forget({"b"})
    assert landings.tokens("a", 0, lambda: lambda: True) == 0
