"""Pulls in parts, each by a lane of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.runtime.cores import usable_cores
from glm52_engine.transfer.agent import PULL_SECONDS, TransferAgent
from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.devices import Choice
from glm52_engine.transfer.lanes import Lanes, how_many
from glm52_engine.transfer.parts import FORGOTTEN_SECONDS, Gathering, parts_of, split
from glm52_engine.transfer.peers import AgentCard, agent_card
from glm52_engine.transfer.pulls import Job, Lane, Peer, Pull, PullCut, TransferError, brought
from glm52_engine.transfer.wire import Ask, Part, decode_part, encode_part
from tests.engine.runtime.support import eventually
from tests.engine.transfer.peer import WidePool
from tests.engine.transfer.remote import Remote

BLOCKS, BLOCK_BYTES = 23, 1 << 20
EVERYTHING = list(range(BLOCKS))
OTHERS = 0xEE
NAMES = itertools.count()


@pytest.mark.parametrize(
    ("devices", "cores", "count"),
    [
        pytest.param(Choice((), 2), 64, 1, id="rails share a transfer"),
        pytest.param(Choice(("mlx5_0:1", "eth0"), 1), 64, 1, id="one rail"),
        pytest.param(Choice(), 16, 8, id="half of the cores"),
        pytest.param(Choice(("eth0",)), 7, 3, id="an interface"),
        pytest.param(Choice(), 192, 8, id="at most"),
        pytest.param(Choice(), 0.5, 1, id="at least"),
    ],
)
def test_lanes_are_as_many_as_bring_something(devices: Choice, cores: float, count: int) -> None:
    found, reason = how_many(devices, cores)
    assert found == count
    assert (f"{cores:g}" in reason) != bool(devices.rails)


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        pytest.param({"cpu.max": "25000 100000\n"}, "0::/\n", 0.25, id="v2"),
        pytest.param({"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, "0::/a/b\n", 0.5, id="a parent"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "10000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/x\n", 0.1, id="v1"
        ),
        pytest.param({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n", None, id="none"),
        pytest.param({"cpu.max": "max 100000\n"}, "0::/\n", None, id="v2 without a quota"),
    ],
)
def test_cores_are_those_of_the_quota(
    tmp_path: Path, files: dict[str, str], membership: str, expected: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(membership)
    found = usable_cores(root=tmp_path, membership=tmp_path / "self")
    if expected is None:
        assert found == usable_cores(root=tmp_path / "absent", membership=tmp_path / "absent") >= 1
    else:
        assert found == expected


@given(st.integers(0, 400), st.integers(1, 50), st.integers(1, 9), st.integers(1, 600))
def test_parts_are_every_block_once_in_order_and_none_is_small(
    blocks: int, block_bytes: int, count: int, least: int
) -> None:
    found = split(blocks, block_bytes, count, least)
    assert [block for first, end in found for block in range(first, end)] == list(range(blocks))
    assert 1 <= len(found) <= count
    sizes = [(end - first) * block_bytes for first, end in found]
    assert len(found) == 1 or min(sizes) >= least
    assert max(sizes) - min(sizes) <= block_bytes
    if len(found) < count:
        assert blocks * block_bytes < (len(found) + 1) * (least + block_bytes - 1), "there was enough for one more"


REGION = Region(1 << 20, 64, 1 << 20)
HOST = Peer("p-1/b", b"b", (REGION,), 2, (), (Lane("p-1/b.1", b"b1"), Lane("p-1/b.2", b"b2")))
PEER = Peer("p-0/a", b"a", (REGION, REGION), 0, (HOST,), (Lane("p-0/a.1", b"a1"),))


@pytest.mark.parametrize(("rank", "names"), [(1, ["p-0/a", "p-0/a.1"]), (2, ["p-1/b", "p-1/b.1", "p-1/b.2"])])
def test_each_part_is_asked_of_its_own_agent_of_the_host_that_has_the_rank(rank: int, names: list[str]) -> None:
    pull = Pull(PEER.holding(rank), rank, [*range(9, 40)], 0, [*range(31)], b"all of it")
    found = parts_of(pull, 4, "d-0/z#1")
    assert [part.peer.holding(rank).name for part in found] == names
    assert {part.peer.name for part in found} == {names[0]}, "by which they are cut"
    assert {(part.peer.holding(rank).regions[rank - part.peer.holding(rank).first_rank]) for part in found} == {REGION}
    assert [block for part in found for block in part.remote_ids] == pull.remote_ids
    assert [block for part in found for block in part.local_ids] == pull.local_ids
    assert {part.notice for part in found} == {encode_part(Part(pull="d-0/z#1", of=len(names), notice=b"all of it"))}


@pytest.mark.parametrize(
    "pull",
    [
        pytest.param(Pull(PEER, 0, [0, 1], 0, [2, 3], b""), id="small"),
        pytest.param(Pull(PEER, 3, [*range(32)], 0, [*range(32)], b""), id="no such rank"),
        pytest.param(Pull(PEER, 0, [*range(32)], 0, [*range(31)], b""), id="lists that differ"),
        pytest.param(Pull(Peer("old/a", b"", (REGION,)), 0, [*range(32)], 0, [*range(32)], b""), id="no lanes there"),
    ],
)
def test_what_is_not_divided_is_asked_as_it_is(pull: Pull) -> None:
    assert parts_of(pull, 4, "x") == [pull]
    assert decode_part(pull.notice) is None


def test_the_owner_is_told_with_the_last_part() -> None:
    gathering = Gathering()
    first, other = Part(pull="d/1#1", of=3, notice=b"1"), Part(pull="d/2#1", of=2, notice=b"2")
    assert [gathering.add(part, 0.0) for part in (first, other, first, other, first)] == [None, None, None, b"2", b"1"]
    gathering.add(first, 1.0)
    gathering.add(other, 2.0)
    assert gathering.add(other, FORGOTTEN_SECONDS + 1.5) == b"2"
    assert len(gathering) == 0, "a pull that lost a lane is forgotten"


def test_a_card_names_the_lanes_and_one_of_before_has_none() -> None:
    card = agent_card(PEER)
    assert AgentCard.model_validate_json(card.model_dump_json()).peer() == PEER
    old = AgentCard.model_validate(card.model_dump(exclude={"lanes", "others"})).peer()
    assert (old.name, old.lanes) == (PEER.name, ())


def jobs(count: int) -> list[Job]:
    return [Job(Pull(PEER, 0, [0], 0, [0], b""), Future(), 60.0, bytes=10 + number) for number in range(count)]


async def test_a_pull_is_done_with_its_last_part() -> None:
    made = jobs(3)
    pulling = asyncio.create_task(brought(made))
    for job in (made[2], made[0]):
        job.end()
        await asyncio.sleep(0.01)
        assert not pulling.done()
    made[1].end()
    assert await pulling == 10 + 11 + 12


async def test_a_part_that_fails_fails_the_pull_now_and_no_block_is_free_before_the_others_are_over() -> None:
    made = jobs(3)
    pulling = asyncio.create_task(brought(made))
    made[0].end()
    made[1].end("reading from p-0/a.1 failed: gone")
    with pytest.raises(PullCut, match=r"p-0/a\.1 failed: gone") as cut:
        await asyncio.wait_for(pulling, 10)
    assert not cut.value.over.done()
    made[2].cut("the lease is lost")
    assert not cut.value.over.done()
    made[2].end("gone, too")
    assert cut.value.over.done()


async def test_when_all_parts_have_failed_their_blocks_are_free() -> None:
    made = jobs(2)
    for job in made:
        job.end("the pod is going away")
    with pytest.raises(TransferError) as failed:
        await brought(made)
    assert type(failed.value) is TransferError


@pytest.mark.parametrize("cut", [False, True])
async def test_a_cancellation_waits_for_every_part(cut: bool) -> None:
    made = jobs(2)
    pulling = asyncio.create_task(brought(made))
    await asyncio.sleep(0)
    pulling.cancel()
    if cut:
        for job in made:
            job.cut("the lease is lost")
    made[0].end()
    await asyncio.sleep(0.01)
    pulling.cancel()
    await asyncio.sleep(0.01)
    assert not pulling.done()
    made[1].end()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(pulling, 10)


@pytest.fixture(scope="module", params=[1, 2, 3])
def remote(request: pytest.FixtureRequest) -> Iterator[Remote]:
    made = Remote(f"prefill/{request.param}", BLOCKS, BLOCK_BYTES, request.param)
    yield made
    made.end()


@contextlib.asynccontextmanager
async def decode(count: int) -> AsyncIterator[tuple[Lanes, WidePool]]:
    pool = WidePool(BLOCKS, BLOCK_BYTES)
    name = f"decode/{next(NAMES)}"
    made = Lanes(name, [pool], on_notice=lambda notice: None, expects=lambda: False, count=count)
    try:
        await asyncio.to_thread(made.start)
        yield made, pool
    finally:
        await asyncio.to_thread(made.close)


@pytest.mark.parametrize("count", [1, 3])
async def test_the_right_bytes_come_by_unequal_lanes_and_the_owner_hears_of_each_pull_once(
    remote: Remote, count: int
) -> None:
    async with decode(count) as (agent, pool):
        for number, blocks in enumerate(([*EVERYTHING], EVERYTHING[::-1], [4, 7], EVERYTHING[3:])):
            ctypes.memset(pool.tensor.data_ptr(), OTHERS, BLOCKS * BLOCK_BYTES)
            here = EVERYTHING[: len(blocks)]
            size = await agent.pull(Pull(remote.peer, 0, blocks, 0, here, b"%d" % number))
            assert size == len(blocks) * BLOCK_BYTES
            assert all(pool.holds(ours, pool.byte(theirs)) for theirs, ours in zip(blocks, here, strict=True))
            assert all(pool.holds(ours, OTHERS) for ours in EVERYTHING[len(blocks) :])
            assert await asyncio.to_thread(remote.line, "NOTICE ") == f"{number}\n", "once, and nothing of parts"


@pytest.mark.parametrize("wrong", [BLOCKS, -1])
async def test_a_part_that_is_refused_refuses_the_pull(remote: Remote, wrong: int) -> None:
    async with decode(3) as (agent, _):
        with pytest.raises(TransferError, match="pool of 23") as failed:
            await agent.pull(Pull(remote.peer, 0, [*EVERYTHING[:-1], wrong], 0, EVERYTHING, b""))
        if isinstance(failed.value, PullCut):
            await asyncio.wait_for(asyncio.wrap_future(failed.value.over), 30)
        assert await agent.pull(Pull(remote.peer, 0, EVERYTHING, 0, EVERYTHING, b"good")) == BLOCKS * BLOCK_BYTES
        while await asyncio.to_thread(remote.line, "NOTICE ") != "good\n":
            pass


async def test_pods_that_go_away_end_their_pulls_and_take_no_new_ones(remote: Remote) -> None:
    async with decode(3) as (agent, _):
        pulling = asyncio.create_task(agent.pull(Pull(remote.peer, 0, EVERYTHING, 0, EVERYTHING, b"")))
        await asyncio.sleep(0)
        await asyncio.to_thread(agent.close)
        with contextlib.suppress(TransferError):
            await asyncio.wait_for(pulling, 10)
        assert not any(each._thread.is_alive() for each in agent._agents)
        with pytest.raises(TransferError, match="going away"):
            await agent.pull(Pull(remote.peer, 0, EVERYTHING, 0, EVERYTHING, b""))


@pytest.mark.parametrize(("notice", "woken"), [(encode_part(Part(pull="d#1", of=3, notice=b"")), [1, 2]), (b"{}", [])])
def test_lanes_that_do_not_look_out_are_woken_for_their_parts(
    monkeypatch: pytest.MonkeyPatch, notice: bytes, woken: list[int]
) -> None:
    made = Lanes("p/1", [WidePool(1, 1)], on_notice=lambda notice: None, expects=lambda: True, count=4)
    found: list[TransferAgent] = []
    monkeypatch.setattr(TransferAgent, "wake", lambda agent: found.append(agent))
    asked = Ask(number=1, life=1, metadata=b"", rank=0, into=(0, 1, 1), runs=[(0, 0, 1)], notice=notice)
    made._agents[0]._on_ask(asked)
    assert found == [made._agents[number] for number in woken]


async def test_a_lane_whose_thread_ends_is_a_failure_of_the_pod() -> None:
    async with decode(2) as (agent, _):
        assert agent.failure is None
        agent._agents[1]._inbox.put("nothing that it knows")  # type: ignore[arg-type]
        await eventually(lambda: agent.failure is not None)


def test_parts_are_remembered_for_longer_than_a_pull_runs() -> None:
    assert FORGOTTEN_SECONDS > PULL_SECONDS
