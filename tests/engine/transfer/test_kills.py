"""Pods that are killed in the middle of a hand-off, over TCP: the other side lives, and no byte comes later."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from glm52_engine.transfer.lanes import Lanes
from glm52_engine.transfer.pulls import LOOK_SECONDS, Pull, PullCut, TransferError
from tests.engine.transfer.peer import WidePool
from tests.engine.transfer.readers import BLOCK_BYTES, BLOCKS, EVERYTHING
from tests.engine.transfer.remote import Process, Remote

KILLS = {1: 15, 3: 5}
"""By the number of lanes."""
OTHERS = 0xEE

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def by_tcp() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        # As between pods, which reach each other by one interface. By two an agent has two connections to another one,
        # and bytes still come by the second when the end of the first is told.
        patch.setenv("UCX_NET_DEVICES", "lo")
        yield


@pytest.fixture(scope="module", params=[1, 3])
def lanes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def local(by_tcp: None, lanes: int) -> AsyncIterator[tuple[Lanes, WidePool]]:
    pool = WidePool(BLOCKS, BLOCK_BYTES)
    agent = Lanes("decode/local", [pool], on_notice=lambda notice: None, expects=lambda: False, count=lanes)
    await asyncio.to_thread(agent.start)
    yield agent, pool
    agent.close()


@pytest.fixture(scope="module")
def bystander(by_tcp: None, lanes: int) -> Iterator[Remote]:
    """A prefill pod to which nothing happens."""
    made = Remote("prefill/bystander", BLOCKS, BLOCK_BYTES, lanes)
    yield made
    made.end()


def everything(remote: Remote) -> Pull:
    return Pull(remote.peer, 0, EVERYTHING, 0, EVERYTHING, b"got it")


async def test_a_prefill_pod_outlives_every_decode_pod_that_is_killed_while_it_pulls(
    local: tuple[Lanes, WidePool], lanes: int
) -> None:
    agent, pool = local
    prefill, readers = Remote("prefill/1", BLOCKS, BLOCK_BYTES, lanes), Process("readers", lanes)
    try:
        readers.say(prefill.card)
        readers.say("steady")
        for number in range(KILLS[lanes]):
            readers.say(str(number * 7 % BLOCKS))
            ended = await asyncio.to_thread(readers.line, "ENDED ")
            assert (int(ended), prefill.process.poll()) == (-signal.SIGKILL, None)
        assert readers.process.stdin is not None
        readers.process.stdin.close()
        assert int(readers.line("ENDED ")) == -signal.SIGKILL, "nobody killed this one before"
        ctypes.memset(pool.tensor.data_ptr(), 0, BLOCKS * BLOCK_BYTES)
        assert await agent.pull(everything(prefill)) == BLOCKS * BLOCK_BYTES
        assert all(pool.holds(block, pool.byte(block)) for block in EVERYTHING)
        assert prefill.process.poll() is None
    finally:
        readers.end()
        prefill.end()


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("how", ["waited for", "cut before"])
async def test_blocks_are_free_when_the_prefill_pod_that_wrote_to_them_is_dead(
    local: tuple[Lanes, WidePool], bystander: Remote, how: str, number: int, lanes: int
) -> None:
    agent, pool = local
    prefill = Remote(f"prefill/{how}/{number}", BLOCKS, BLOCK_BYTES, lanes)
    try:
        pulling = await frozen_in_the_middle(agent, pool, prefill)
        if how == "cut before":
            agent.cut(prefill.peer.name, "the lease is lost")
            with pytest.raises(PullCut, match="the lease is lost") as cut:
                await asyncio.wait_for(pulling, 10)
            assert not cut.value.over.done(), "it may go on, and then the bytes come"
            prefill.end()
            await asyncio.wait_for(asyncio.wrap_future(cut.value.over), 30)
        else:
            prefill.end()
            with pytest.raises(TransferError, match=prefill.peer.name) as failed:
                await asyncio.wait_for(pulling, 30)
            await until_free(failed.value, lanes)
        # The blocks are another request's now.
        ctypes.memset(pool.tensor.data_ptr(), OTHERS, BLOCKS * BLOCK_BYTES)
        for _ in range(10):
            assert await agent.pull(Pull(bystander.peer, 0, [5], 0, [0], b"")) == BLOCK_BYTES
        assert pool.holds(0, pool.byte(5))
        assert all(pool.holds(block, OTHERS) for block in EVERYTHING[1:])
    finally:
        prefill.end()


async def test_a_connection_that_is_lost_between_two_that_live_is_made_anew(
    local: tuple[Lanes, WidePool], lanes: int
) -> None:
    agent, pool = local
    prefill = Remote("prefill/parted", BLOCKS, BLOCK_BYTES, lanes)
    try:
        for _ in range(3):
            # All lanes are connected: what a frozen pod has not accepted could not be shut below.
            await agent.pull(everything(prefill))
            pulling = await frozen_in_the_middle(agent, pool, prefill)
            assert shut_connections_to(prefill.process.pid)
            with pytest.raises(TransferError, match=r"prefill/parted(\.\d)? failed") as failed:
                await asyncio.wait_for(pulling, 30)
            await until_free(failed.value, lanes)
            ctypes.memset(pool.tensor.data_ptr(), OTHERS, BLOCKS * BLOCK_BYTES)
            prefill.process.send_signal(signal.SIGCONT)
            assert await agent.pull(Pull(prefill.peer, 0, [7], 0, [0], b"")) == BLOCK_BYTES
            assert pool.holds(0, pool.byte(7))
            assert all(pool.holds(block, OTHERS) for block in EVERYTHING[1:])
    finally:
        prefill.end()


async def test_a_lane_that_is_lost_fails_the_pull_and_its_blocks_stay_booked_for_the_others(
    local: tuple[Lanes, WidePool], lanes: int
) -> None:
    if lanes == 1:
        pytest.skip("there are no others")
    agent, pool = local
    prefill = Remote("prefill/lane-lost", BLOCKS, BLOCK_BYTES, lanes)
    try:
        # All are connected: what a frozen pod has not accepted could not be shut.
        await agent.pull(everything(prefill))
        pulling = await frozen_in_the_middle(agent, pool, prefill)
        for descriptor in connections_to(prefill.process.pid):
            # A lane that has brought its part already misses nothing.
            with contextlib.suppress(OSError):
                shut(descriptor)
            if (await asyncio.wait([pulling], timeout=4 * LOOK_SECONDS))[0]:
                break
        with pytest.raises(TransferError, match=r"prefill/lane-lost(\.\d)? failed") as failed:
            await asyncio.wait_for(pulling, 30)
        prefill.process.send_signal(signal.SIGCONT)
        await until_free(failed.value, lanes)
        ctypes.memset(pool.tensor.data_ptr(), OTHERS, BLOCKS * BLOCK_BYTES)
        for _ in range(3):
            assert await agent.pull(Pull(prefill.peer, 0, EVERYTHING[:32], 0, EVERYTHING[:32], b"")) == 32 * BLOCK_BYTES
        assert all(pool.holds(block, pool.byte(block)) for block in EVERYTHING[:32])
        assert all(pool.holds(block, OTHERS) for block in EVERYTHING[32:])
    finally:
        prefill.end()


async def until_free(error: TransferError, lanes: int) -> None:
    """One lane finds the end before the others do."""
    if isinstance(error, PullCut):
        assert lanes > 1
        await asyncio.wait_for(asyncio.wrap_future(error.over), 30)


def shut_connections_to(pid: int) -> int:
    """How many of this process's TCP connections lead there; they are shut."""
    found = connections_to(pid)
    for descriptor in found:
        shut(descriptor)
    return len(found)


def connections_to(pid: int) -> list[int]:
    """File descriptors of this process."""
    ports = {local for local, _, inode in tcp_sockets() if inode in inodes_of(pid)}
    mine = inodes_of(os.getpid())
    return [mine[inode] for _, remote, inode in tcp_sockets() if remote in ports and inode in mine]


def shut(descriptor: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def tcp_sockets() -> list[tuple[str, str, str]]:
    """Local port, remote port and inode of each."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [(row[1].split(":")[1], row[2].split(":")[1], row[9]) for row in rows]


def inodes_of(pid: int) -> dict[str, int]:
    """File descriptors by their socket's inode."""
    links = {int(fd.name): os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    return {link[8:-1]: fd for fd, link in links.items() if link.startswith("socket:[")}


async def frozen_in_the_middle(agent: Lanes, pool: WidePool, prefill: Remote) -> asyncio.Task[int]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        ctypes.memset(pool.tensor.data_ptr(), 0, BLOCKS * BLOCK_BYTES)
        pulling = asyncio.create_task(agent.pull(everything(prefill)))
        while not any(pool.tensor.bytes[:: BLOCK_BYTES // 4]) and not pulling.done():
            assert time.monotonic() < until, "no byte comes"
            await asyncio.sleep(0)
        prefill.freeze()
        # What was on its way is there when no more of it comes.
        if not (await asyncio.wait([pulling], timeout=0.1))[0]:
            return pulling
        prefill.process.send_signal(signal.SIGCONT)
    raise AssertionError("it was always too late")
