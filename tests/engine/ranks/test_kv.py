"""Pulls into pools of a replica's other hosts, as the leader sees them; who carries them out is a stand-in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from glm52_engine.ranks.kv import ReplicaAgent, agent_of, fetch_of, peer_of
from glm52_engine.ranks.messages import Fetch, decode, encode
from glm52_engine.ranks.spans import RankSpan
from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.pulls import Lane, Peer, Pull, PullCut, TransferError
from tests.engine.runtime.support import eventually

SOURCE = Peer("chat-prefill-0/a", b"", (Region(0, 4, 8),))


class Own:
    name = "chat-decode-0/b"
    regions = (Region(0, 4, 8),)

    def __init__(self) -> None:
        self.cuts: list[tuple[str, str]] = []

    def cut(self, peer: str, reason: str) -> None:
        self.cuts.append((peer, reason))


class Carrier:
    def __init__(self) -> None:
        self.asked: list[asyncio.Future[int]] = []

    def fetch(self, pull: Pull) -> asyncio.Future[int]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]


def replica() -> tuple[ReplicaAgent, Carrier, Any]:
    others = [
        agent_of(Peer(f"chat-decode-{host}/c", b"", (Region(0, 4, 8), Region(0, 4, 8)), 2 * host - 1))
        for host in (1, 2)
    ]
    carrier, own = Carrier(), Own()
    return ReplicaAgent(own, others, carrier), carrier, own  # type: ignore[arg-type]


def pulled(agent: ReplicaAgent, rank: int) -> asyncio.Task[int]:
    return asyncio.create_task(agent.pull(Pull(SOURCE, 0, [0], rank, [1], b"")))


async def begun(carrier: Carrier, count: int = 1) -> None:
    await eventually(lambda: len(carrier.asked) == count)


def test_a_rank_host_learns_of_every_lane_of_the_peer() -> None:
    peer = Peer("chat-prefill-1/a", b"\x00one", (Region(0, 4, 8),), 3, (), (Lane("chat-prefill-1/a.1", b"\xfftwo"),))
    asked = decode(encode(fetch_of(1, Pull(peer, 3, [0], 2, [1], b""), RankSpan("chat-decode-2", 2, 1))))
    assert isinstance(asked, Fetch)
    assert peer_of(asked.peer) == peer


async def test_a_cut_is_told_at_once_with_host_and_reason_and_the_blocks_stay_booked() -> None:
    agent, carrier, own = replica()
    cut, other = pulled(agent, 3), pulled(agent, 2)
    await begun(carrier, 2)
    agent.cut("chat-prefill-9/z", "it has restarted")
    agent.cut(SOURCE.name, "prefill 10.0.0.7:8000 has been silent for 8 s")
    assert own.cuts[-1] == (SOURCE.name, "prefill 10.0.0.7:8000 has been silent for 8 s")
    with pytest.raises(PullCut) as told:
        await cut
    assert str(told.value) == (
        "a pull into rank 3 on host chat-decode-2 was cut: prefill 10.0.0.7:8000 has been silent for 8 s"
    )
    assert not told.value.over.done()
    carrier.asked[0].set_exception(TransferError("reading took too long"))
    await asyncio.wait_for(asyncio.wrap_future(told.value.over), 30)
    with pytest.raises(PullCut, match="into rank 2 on host chat-decode-1 was cut"):
        await other
    carrier.asked[1].set_result(8)
    assert not agent._under_way


async def test_a_pull_that_fails_names_the_host_too() -> None:
    agent, carrier, _ = replica()
    task = pulled(agent, 1)
    await begun(carrier)
    carrier.asked[0].set_exception(TransferError("cannot read from chat-prefill-0/a: no route"))
    with pytest.raises(TransferError, match=r"into rank 1 on host chat-decode-1 failed: .*no route"):
        await task
    # What is told later finds nobody.
    agent.cut(SOURCE.name, "late")


async def test_who_gives_up_waits_until_nothing_is_written_any_more_also_after_a_cut() -> None:
    agent, carrier, _ = replica()
    task = pulled(agent, 1)
    await begun(carrier)
    task.cancel()
    await asyncio.sleep(0)
    agent.cut(SOURCE.name, "gone")
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    carrier.asked[0].set_result(8)
    with pytest.raises(asyncio.CancelledError):
        await task
