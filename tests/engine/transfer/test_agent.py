"""Real NIXL between two processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from glm52_engine.transfer import parts
from glm52_engine.transfer.agent import TransferAgent
from glm52_engine.transfer.lanes import Lanes
from glm52_engine.transfer.pulls import Peer, Pull, PullCut, TransferError
from tests.engine.serve.fakes import FakePool
from tests.engine.transfer.remote import BLOCKS, Remote

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    """A peer that every test may read from and none may end."""
    made = Remote("prefill/1")
    yield made
    made.end()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local() -> AsyncIterator[tuple[TransferAgent, FakePool]]:
    pool = FakePool(BLOCKS)
    agent = TransferAgent("decode/1", [pool], on_notice=lambda notice: None, expects=lambda: False)
    await asyncio.to_thread(agent.start)
    yield agent, pool
    agent.close()


def pull(peer: Peer, remote: list[int], local: list[int], rank: int = 0) -> Pull:
    return Pull(peer, rank, remote, 0, local, b"got it")


def block(number: int, size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(number * size, (number + 1) * size))


async def test_the_right_bytes_arrive_are_counted_and_announced(
    local: tuple[TransferAgent, FakePool], remote: Remote
) -> None:
    agent, pool = local
    theirs, ours = [5, 6, 7, 3, 60], [10, 11, 12, 40, 0]
    size = await agent.pull(pull(remote.peer, theirs, ours))
    assert size == 5 * pool.block_bytes
    for their, our in zip(theirs, ours, strict=True):
        at = our * pool.block_bytes
        assert bytes(pool.tensor.bytes[at : at + pool.block_bytes]) == block(their, pool.block_bytes)
    assert await asyncio.to_thread(remote.line, "NOTICE ") == "got it\n"


@pytest.mark.parametrize(
    ("theirs", "ours", "rank"),
    [([BLOCKS], [0], 0), ([-1], [0], 0), ([0], [BLOCKS], 0), ([0, 1], [0], 0), ([0], [0], 1)],
)
async def test_blocks_that_do_not_exist_are_refused(
    local: tuple[TransferAgent, FakePool], remote: Remote, theirs: list[int], ours: list[int], rank: int
) -> None:
    with pytest.raises(TransferError):
        await local[0].pull(pull(remote.peer, theirs, ours, rank))


async def test_metadata_that_is_none_is_refused(local: tuple[TransferAgent, FakePool], remote: Remote) -> None:
    with pytest.raises(TransferError, match="cannot read from nobody"):
        await local[0].pull(pull(Peer("nobody", b"nonsense", remote.peer.regions), [0], [0]))


async def test_a_frozen_peer_ends_at_the_deadline_a_dead_one_at_once_and_its_successor_works(
    local: tuple[TransferAgent, FakePool],
) -> None:
    agent, pool = local
    frozen = Remote("prefill/2")
    assert await agent.pull(pull(frozen.peer, [0], [0])) == pool.block_bytes
    os.kill(frozen.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    # Shared-memory transports read a frozen process without its help: only a remote one needs it.
    with contextlib.suppress(TransferError):
        await agent.pull(pull(frozen.peer, list(range(BLOCKS)), list(range(BLOCKS))), seconds=1)
    assert time.monotonic() - began < 5
    frozen.end()
    with pytest.raises(TransferError, match="prefill/2"):
        await agent.pull(pull(frozen.peer, [0], [0]), seconds=5)
    successor = Remote("prefill/2-again")
    try:
        assert await agent.pull(pull(successor.peer, [1], [2])) == pool.block_bytes
        at = 2 * pool.block_bytes
        assert bytes(pool.tensor.bytes[at : at + pool.block_bytes]) == block(1, pool.block_bytes)
    finally:
        successor.end()


@pytest.mark.parametrize("lanes", [1, 3])
async def test_a_pull_that_is_cut_is_told_at_once_and_its_blocks_are_free_when_no_byte_can_come(
    monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    # Over TCP a peer has to help: from a frozen one nothing comes, and its connection stays.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pool = FakePool(BLOCKS)
    agent = Lanes("decode/by-tcp", [pool], on_notice=lambda notice: None, expects=lambda: False, count=lanes)
    await asyncio.to_thread(agent.start)
    frozen = Remote("prefill/by-tcp", lanes=lanes)
    everything = list(range(BLOCKS))
    try:
        assert await agent.pull(pull(frozen.peer, [0], [0])) == pool.block_bytes
        await asyncio.to_thread(frozen.freeze)
        reading = asyncio.create_task(agent.pull(pull(frozen.peer, everything, everything)))
        await asyncio.sleep(0.1)
        assert not reading.done()
        agent.cut("another/1", "not this one")
        agent.cut(frozen.peer.name, "the lease is lost")
        with pytest.raises(PullCut, match="the lease is lost") as cut:
            await asyncio.wait_for(reading, 10)
        await asyncio.sleep(0.1)
        assert not cut.value.over.done(), "it may go on, and then the bytes come"
        os.kill(frozen.process.pid, signal.SIGCONT)
        await asyncio.wait_for(asyncio.wrap_future(cut.value.over), 30)
        # The blocks are another request's now.
        ctypes.memset(pool.tensor.data_ptr(), 0xEE, BLOCKS * pool.block_bytes)
        for _ in range(10):
            assert await agent.pull(pull(frozen.peer, [5], [0])) == pool.block_bytes
        assert bytes(pool.tensor.bytes[: pool.block_bytes]) == block(5, pool.block_bytes)
        assert set(pool.tensor.bytes[pool.block_bytes :]) == {0xEE}
    finally:
        frozen.end()
        agent.close()


async def test_a_cancelled_pull_is_over_when_the_cancellation_arrives(
    local: tuple[TransferAgent, FakePool], remote: Remote
) -> None:
    agent, _ = local
    task = asyncio.create_task(agent.pull(pull(remote.peer, list(range(BLOCKS)), list(range(BLOCKS)))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert await agent.pull(pull(remote.peer, [0], [0])) > 0
