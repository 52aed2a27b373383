"""The engine as the serving side sees it: prefill here, decode there, and the same tokens as in one place."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from glm52_engine.config import KvCacheDtype
from glm52_engine.runtime.types import Blocks, RequestError, Token
from tests.engine.model.support import Ours, prompt
from tests.engine.runtime.support import BLOCK, Maker, copy_blocks, eventually, generate, greedy, hand_over, idle


def ids(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


async def test_prefill_here_and_decode_there(maker: Maker, tiny_checkpoint: Path) -> None:
    lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, 33, 100)
    requests = [greedy(f"r{n}", tuple(prompt(n, seed=n)), 12) for n in lengths]
    async with maker.running() as source, maker.running(ranks=2) as target:
        outputs = await asyncio.gather(*(generate(source, target, request) for request in requests))
        assert idle(source)
        assert idle(target)
        assert target.stats().prompt_tokens_computed == 0
        assert source.stats().prompt_tokens_computed == sum(lengths)
        assert target.stats().tokens_generated == 11 * len(lengths)
    alone = Ours(tiny_checkpoint)
    for request, output in zip(requests, outputs, strict=True):
        assert ids(output) == alone.greedy(request.prompt, 12, chunk=1000), request.id
        assert [token.index for token in output] == list(range(12))
        assert [token.finish for token in output] == [None] * 11 + ["length"]


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
async def test_a_narrow_cache_is_the_same_here_and_there(
    maker: Maker, tiny_checkpoint: Path, dtype: KvCacheDtype
) -> None:
    request = greedy("r", tuple(prompt(100)), 12)
    async with maker.running(kv_cache_dtype=dtype) as source, maker.running(kv_cache_dtype=dtype) as target:
        found = ids(await generate(source, target, request))
    alone = Ours(tiny_checkpoint, kv_cache_dtype=dtype)
    assert found == alone.greedy(request.prompt, 12, chunk=1000)
    assert alone.pool.block_bytes * 1.7 < Ours(tiny_checkpoint).pool.block_bytes


async def test_wrong_bytes_are_noticed(maker: Maker) -> None:
    """The control of the test above: one block less, and the tokens differ."""
    request = greedy("r", tuple(prompt(60)), 12)
    async with maker.running() as source, maker.running() as target:
        right = await generate(source, target, request)
        prefilled = await source.prefill(request)
        blocks = await target.reserve(request)
        copy_blocks(source, prefilled, target, blocks)
        target.pools[0].tensor[blocks.ids[1]] = 0
        wrong = [prefilled.token] + [token async for token in target.decode(request, blocks, prefilled.token)]
    assert ids(wrong) != ids(right)


async def test_a_block_count_at_every_boundary(maker: Maker) -> None:
    """prompt + max_tokens around a multiple of the block size: the last block must be there."""
    async with maker.running() as source, maker.running() as target:
        for max_tokens in (2, 3, 4, 5, BLOCK + 3, BLOCK + 4):
            request = greedy("r", tuple(prompt(2 * BLOCK - 3)), max_tokens, ignore_eos=True)
            assert len(await generate(source, target, request)) == max_tokens
            assert idle(target)


@pytest.mark.parametrize("longest", [4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
async def test_an_output_that_ends_at_the_model_length_exactly(
    maker: Maker, tiny_checkpoint: Path, longest: int
) -> None:
    limits = {"max_model_len": longest, "blocks": 5}
    request = greedy("r", tuple(prompt(longest - 6)), 6, ignore_eos=True)
    async with maker.running(**limits) as source, maker.running(**limits) as target:
        assert ids(await generate(source, target, request)) == Ours(tiny_checkpoint).greedy(
            request.prompt, 6, chunk=1000
        )
        assert idle(target)


async def test_sampling_depends_on_seed_and_index_only(maker: Maker) -> None:
    request = greedy("r", tuple(prompt(40)), 16, temperature=1.0, seed=7, top_p=0.95)
    others = [greedy(f"o{n}", tuple(prompt(5 + n, seed=n)), 16, temperature=1.0, seed=n) for n in range(5)]
    async with maker.running() as source, maker.running(ranks=2) as target:
        alone = await generate(source, target, request)
        crowd = await asyncio.gather(*(generate(source, target, each) for each in (*others, request)))
        other_seed = await generate(source, target, greedy("r", request.prompt, 16, temperature=1.0, seed=8))
        unseeded = [await generate(source, target, greedy("r", request.prompt, 16, temperature=1.0)) for _ in range(2)]
    assert ids(crowd[-1]) == ids(alone)
    assert ids(other_seed) != ids(alone)
    assert ids(unseeded[0]) != ids(unseeded[1])


async def test_how_an_output_ends(maker: Maker) -> None:
    async with maker.running() as source, maker.running() as target:
        full = ids(await generate(source, target, greedy("r", tuple(prompt(20)), 12)))
        cut = full.index(full[5])
        stopped = await generate(
            source, target, greedy("r", tuple(prompt(20)), 12, stop_token_ids=frozenset({full[5]}))
        )
        assert ids(stopped) == full[: cut + 1]
        assert stopped[-1].finish == "stop"
        single = await source.prefill(greedy("one", tuple(prompt(20)), 1))
        assert single.token == Token(full[0], 0, "length")
        source.release("one")
    async with maker.running(eos_ids=frozenset({full[0], full[5]})) as source, maker.running() as target:
        first = await source.prefill(greedy("r", tuple(prompt(20)), 12))
        assert first.token.finish == "stop"
        source.release("r")
        ignoring = await source.prefill(greedy("r", tuple(prompt(20)), 12, ignore_eos=True))
        assert ignoring.token.finish is None
        # A first token that already ended the output: nothing to decode, nothing kept.
        blocks = await target.reserve(greedy("r", tuple(prompt(20)), 12))
        assert [token async for token in target.decode(greedy("r", (1,), 12), blocks, first.token)] == []
        assert idle(target)


async def test_no_id_from_the_padding_of_the_vocabulary(maker: Maker) -> None:
    async with maker.running(vocab_bound=ord("c")) as source, maker.running(vocab_bound=ord("c")) as target:
        request = greedy("r", tuple(prompt(20)), 30, temperature=5.0, ignore_eos=True)
        assert max(ids(await generate(source, target, request))) < ord("c")


async def test_requests_that_can_never_run(maker: Maker) -> None:
    async with maker.running(blocks=8, max_model_len=200) as engine:
        with pytest.raises(RequestError, match="194 prompt tokens \\+ 7 max_tokens = 201, more than the model length"):
            await engine.reserve(greedy("r", tuple(prompt(194)), 7))
        with pytest.raises(RequestError, match="130 tokens need 9 blocks of 16; a rank has 8"):
            await engine.reserve(greedy("r", tuple(prompt(100)), 30))
        # Prefill stores the prompt only: the same request fits there.
        assert (await engine.prefill(greedy("r", tuple(prompt(100)), 30))).computed_tokens == 100
        with pytest.raises(RequestError, match="a request with the id r is already here"):
            await engine.prefill(greedy("r", (1,), 1))


async def test_decode_wants_its_own_reservation(maker: Maker) -> None:
    async with maker.running() as engine:
        request = greedy("r", tuple(prompt(5)), 5)
        blocks = await engine.reserve(request)
        with pytest.raises(ValueError, match="r: decode needs the blocks"):
            engine.decode(request, Blocks(0, (1, 2, 3)), Token(65, 0))
        engine.release("r")
        with pytest.raises(ValueError, match="r: decode needs the blocks"):
            engine.decode(request, blocks, Token(65, 0))


async def test_waiting_is_first_come_first_served(maker: Maker) -> None:
    async with maker.running(seats=1) as engine:
        order: list[str] = []

        async def run(name: str) -> None:
            request = greedy(name, tuple(prompt(5)), 5)
            blocks = await engine.reserve(request)
            order.append(name)
            async for _ in engine.decode(request, blocks, Token(65, 0)):
                pass

        await asyncio.gather(*(run(name) for name in "abcde"))
        assert order == list("abcde")
        await eventually(lambda: idle(engine))


async def test_the_same_prompt_is_computed_once_and_counted_once(maker: Maker) -> None:
    async with maker.running(step_tokens=16) as source, maker.running() as target:
        await hand_over(source, target, greedy("r", tuple(prompt(50)), 5))
        stats = source.stats()
        assert (stats.prompt_tokens_computed, stats.tokens_generated, stats.steps) == (50, 1, 4)
