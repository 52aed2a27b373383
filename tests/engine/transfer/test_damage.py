"""KV that changes on its way: never other tokens."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from glm52_engine.transfer.checksums import checksums, damage
from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.lanes import Lanes
from glm52_engine.transfer.pulls import Pull
from tests.engine.serve.deployment import PROMPT, Builder, Deployment, body, builder
from tests.engine.serve.fakes import FakeEngine, FakePool, expected_text
from tests.engine.transfer.conftest import BY_LANES


@pytest_asyncio.fixture
async def build(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> AsyncIterator[Builder]:
    async with builder(monkeypatch, tiny_checkpoint) as made:
        yield made


def spoil(monkeypatch: pytest.MonkeyPatch, engines: list[FakeEngine], times: int) -> list[int]:
    """One bit of the last byte of that many pulls changes after the READ; gives the blocks in which it did."""
    spoiled: list[int] = []
    pull = Lanes.pull

    async def flips(self: Lanes, asked: Pull, **more: Any) -> int:
        size = await pull(self, asked, **more)
        pool = next(e.pool for e in engines if e.pool.tensor.data_ptr() == self.regions[0].address)
        if len(spoiled) < times:
            last = asked.local_ids[-1]
            # Of the prompt's last token: what lies behind it in the block is nobody's.
            pool.tensor.bytes[pool.slot(asked.local_ids, len(PROMPT) - 1)] ^= 4
            spoiled.append(last)
        return size

    monkeypatch.setattr(Lanes, "pull", flips)
    return spoiled


async def deployed(build: Builder) -> tuple[Deployment, list[FakeEngine]]:
    decode = [FakeEngine(), FakeEngine()]
    return await build.deployment([FakeEngine(), FakeEngine()], decode), decode


@pytest.mark.usefixtures("pods_of_lanes")
@BY_LANES
@pytest.mark.parametrize("stream", [False, True])
async def test_a_flipped_bit_is_noticed_and_the_prompt_computed_anew(
    build: Builder, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made, decode = await deployed(build)
    spoiled = spoil(monkeypatch, decode, times=1)
    answer = await made.post("/v1/completions", body(stream=stream))
    assert answer.status == 200
    text = expected_text(PROMPT, 12)
    assert stream or answer.json()["choices"][0]["text"] == text
    assert len(spoiled) == 1
    assert sum(pod.process.pod.counters.pulls_failed for pod in made.decode) == 1
    assert sum(engine.computed for engine in (pod.engine for pod in made.prefill)) == 2 * len(PROMPT)
    await made.idle()


@pytest.mark.usefixtures("pods_of_lanes")
@BY_LANES
async def test_bits_that_flip_every_time_are_an_error_that_names_the_block(
    build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, decode = await deployed(build)
    spoil(monkeypatch, decode, times=100)
    answer = await made.post("/v1/completions", body())
    assert (answer.status, answer.json()["error"]["code"]) == (502, "kv_transfer_failed")
    blocks = -(-len(PROMPT) // 4)
    assert f"is damaged: 1 of {blocks} blocks" in answer.json()["error"]["message"]
    assert str(blocks - 1) in answer.json()["error"]["message"]
    assert not any(engine.decoded for engine in decode)
    await made.idle()


def test_checksums_are_of_each_block_in_the_order_that_was_asked() -> None:
    pool = FakePool(4)
    region = Region(pool.tensor.data_ptr(), pool.num_blocks, pool.block_bytes)
    ctypes.memset(region.address, 7, pool.block_bytes)
    one, other = checksums(region, [0, 1])
    assert one != other == checksums(region, [2])[0]
    assert checksums(region, [1, 0]) == [other, one]
    with pytest.raises(ValueError, match="pool of 4"):
        checksums(region, [4])


def test_damage_names_the_blocks() -> None:
    assert damage([1, 2, 3], [1, 2, 3]) == ""
    assert damage([1, 2, 3], [1, 5, 3]) == "1 of 3 blocks came with other bytes than they have there: 1"
    assert damage(list(range(9)), [0] * 9).endswith("1, 2, 3, 4, 5 …")
