"""What a decode leaves in a store when it is over: prompt and output, as the next turn's prompt will ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from glm52_engine.kv import prefix_keys
from glm52_engine.model import Span
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.executor import EagerWork, HostExecutor
from glm52_engine.runtime.requests import salt_of
from glm52_engine.runtime.types import Request
from tests.engine.model.support import prompt
from tests.engine.runtime.content import ContentModel, LateExecutor, continuation
from tests.engine.runtime.shelf import Shelf
from tests.engine.runtime.support import BLOCK, Maker, eventually, generate, greedy, hand_over, idle

PROMPT = tuple(97 + n % 26 for n in range(2 * BLOCK + 3))
OUTPUT = 2 * BLOCK


def keys_of(engine: LocalEngine, request: Request, tokens: Sequence[int]) -> tuple[bytes, ...]:
    return prefix_keys(tokens, BLOCK, salt_of(request, engine.layout))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("output", [2, BLOCK - 3, BLOCK - 2, OUTPUT])
async def test_full_blocks_of_prompt_and_output_are_saved_and_hold_what_was_said(
    maker: Maker, ahead: bool, length: int, output: int
) -> None:
    asked = greedy("r", PROMPT[:length], output, ignore_eos=True, stop_token_ids=frozenset())
    shelf, model = Shelf(), ContentModel(maker.spec.vocab_size)
    executor = LateExecutor if ahead else HostExecutor
    target = maker.make(prefix_cache=False, model=model, launch_ahead=ahead, executor=executor)
    target.use_store(shelf)
    target.start()
    async with maker.running(model=model) as source:
        said = [token.id for token in await generate(source, target, asked)]
        assert said == continuation(asked.prompt, output)
        await eventually(lambda: idle(target))
        # The last token has no KV.
        tokens = [*asked.prompt, *said[:-1]]
        keys = keys_of(target, asked, tokens)
        new = len(keys) > length // BLOCK
        assert set(shelf.kept) == (set(keys) if new else set())
        pool = target.pools[0]
        for index, key in enumerate(keys if new else ()):
            pool.tensor[0] = shelf.kept[key]
            rows = pool.mla[0][0][:, 0].long().tolist()  # type: ignore[attr-defined]
            assert rows == tokens[index * BLOCK : (index + 1) * BLOCK]
    target.stop()


async def test_what_prefill_has_saved_is_left_out_where_there_is_no_room_for_all(maker: Maker) -> None:
    shelf, model = Shelf(), ContentModel(maker.spec.vocab_size)
    asked = greedy("r", PROMPT, OUTPUT, ignore_eos=True)
    shelf.room = 3
    target = maker.make(prefix_cache=False, model=model)
    target.use_store(shelf)
    target.start()
    async with maker.running(model=model) as source:
        said = [token.id for token in await generate(source, target, asked)]
        await eventually(lambda: idle(target))
        assert set(shelf.kept) == set(keys_of(target, asked, [*PROMPT, *said[:-1]])[2:])
    target.stop()


async def test_an_answer_that_its_client_gave_up_is_saved_as_far_as_it_came(maker: Maker) -> None:
    shelf, model = Shelf(), ContentModel(maker.spec.vocab_size)
    asked = greedy("r", PROMPT, 20 * BLOCK, ignore_eos=True)
    target = maker.make(prefix_cache=False, model=model)
    target.use_store(shelf)
    target.start()
    async with maker.running(model=model) as source:
        blocks, first = await hand_over(source, target, asked)
        said, stream = [first.id], target.decode(asked, blocks, first)
        async for token in stream:
            said.append(token.id)
            if len(said) == BLOCK:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: idle(target))
        keys = keys_of(target, asked, [*PROMPT, *continuation(PROMPT, 20 * BLOCK)])
        assert set(keys[:3]) <= set(shelf.kept) <= set(keys)
    target.stop()


async def test_blocks_of_an_answer_on_their_way_out_are_nobody_elses(maker: Maker) -> None:
    shelf, model = Shelf(), ContentModel(maker.spec.vocab_size)
    asked = greedy("r", PROMPT, OUTPUT, ignore_eos=True)
    target = maker.make(prefix_cache=False, model=model, blocks=6)
    target.use_store(shelf)
    target.start()
    shelf.hold()
    async with maker.running(model=model) as source:
        said = [token.id for token in await generate(source, target, asked)]
        await eventually(lambda: target.stats().blocks_free == 2)
        target.check_integrity()
        shelf.go_on()
        await eventually(lambda: idle(target))
        assert set(shelf.kept) == set(keys_of(target, asked, [*PROMPT, *said[:-1]]))
    target.stop()


class Spoilt(LateExecutor):
    """The second block of an output gives no numbers."""

    def launch(self, spans: Sequence[Span]) -> EagerWork:
        work = super().launch(spans)
        if spans[0].start >= len(PROMPT) + BLOCK:
            work.logits = torch.full_like(work.logits, float("nan"))
        return work


@pytest.mark.parametrize("ahead", [False, True])
async def test_kv_that_gave_no_numbers_is_not_saved(maker: Maker, ahead: bool) -> None:
    shelf = Shelf()
    asked = greedy("r", PROMPT, OUTPUT, ignore_eos=True)
    # With a step ahead the end is told after the token.
    target = maker.make(prefix_cache=False, executor=Spoilt, launch_ahead=ahead)
    target.use_store(shelf)
    target.start()
    async with maker.running() as source:
        said = await generate(source, target, asked)
        assert said[-1].finish == "error"
        await eventually(lambda: idle(target))
        assert not shelf.kept
    target.stop()


@pytest.mark.parametrize("salt", ["", "x"])
async def test_the_next_turn_computes_only_what_is_new(maker: Maker, salt: str) -> None:
    first = greedy("a", tuple(prompt(2 * BLOCK + 3, seed=61)), OUTPUT, ignore_eos=True)
    shelf = Shelf()
    target = maker.make(prefix_cache=False)
    target.use_store(shelf)
    target.start()
    async with maker.running(prefix_cache=False) as plain, maker.running() as other:
        said = [token.id for token in await generate(plain, target, first)]
        await eventually(lambda: idle(target))
        turn = Request("b", (*first.prompt, *said, *prompt(5, seed=62)), first.sampling, cache_salt=salt)
        expected = [token.id for token in await generate(plain, other, turn)]
        source = maker.make()
        source.use_store(shelf)
        source.start()
        assert [token.id for token in await generate(source, other, turn)] == expected
        found = 0 if salt else (len(first.prompt) + OUTPUT - 1) // BLOCK * BLOCK
        assert source.stats().prompt_tokens_computed == len(turn.prompt) - found
        source.stop()
    target.stop()


async def test_a_seat_that_was_taken_before_the_salt_was_known_saves_under_the_salt(maker: Maker) -> None:
    asked = greedy("r", PROMPT, OUTPUT, ignore_eos=True)
    salted = Request("r", PROMPT, asked.sampling, cache_salt="x")
    shelf = Shelf()
    target = maker.make(prefix_cache=False, model=ContentModel(maker.spec.vocab_size))
    target.use_store(shelf)
    target.start()
    async with maker.running(model=ContentModel(maker.spec.vocab_size)) as source:
        blocks, first = await hand_over(source, target, asked)
        said = [first.id, *[token.id async for token in target.decode(salted, blocks, first)]]
        await eventually(lambda: idle(target))
        assert set(shelf.kept) == set(keys_of(target, salted, [*PROMPT, *said[:-1]]))
    target.stop()


async def test_without_a_store_no_output_is_kept(maker: Maker) -> None:
    kept: list[Span] = []

    class Watching(HostExecutor):
        def keep(self, spans: Sequence[Span]) -> None:
            kept.extend(span for span in spans if len(span.tokens) == 1)

    async with maker.running() as source, maker.running(prefix_cache=False, executor=Watching) as target:
        await generate(source, target, greedy("r", PROMPT, OUTPUT, ignore_eos=True))
    assert not kept
