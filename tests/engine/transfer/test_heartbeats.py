"""Leases that many requests hold at one pod, and what becomes of them when it falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from glm52_engine.transfer.heartbeats import SILENCE_SECONDS, At, Beat, Heartbeats, PeerGone
from glm52_engine.transfer.lease import HEARD_SECONDS
from glm52_engine.transfer.pulls import TransferError
from tests.engine.runtime.support import eventually

A, B = At("10.0.0.1:8000", "prefill-0/1"), At("10.0.0.2:8000", "prefill-1/1")


class Peer:
    """A prefill pod as heartbeats see it: `answer` is what it says to the next ones. Time passes with each call."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[tuple[At, list[str]]] = []
        self.answer: Callable[[Sequence[str]], Beat] = lambda ids: Beat(ids, 15)

    async def ask(self, at: At, ids: Sequence[str]) -> Beat:
        self.asked.append((at, list(ids)))
        self.now += 1
        return self.answer(ids)

    async def calls(self, count: int) -> None:
        until = len(self.asked) + count
        await eventually(lambda: len(self.asked) >= until, within=30)

    def beats(self) -> Heartbeats:
        return Heartbeats(self.ask, beat=0.001, silence=8, clock=lambda: self.now)


def failing(error: Exception) -> Callable[[Sequence[str]], Beat]:
    def answer(ids: Sequence[str]) -> Beat:
        raise error

    return answer


async def test_one_call_renews_all_that_is_held_at_a_pod() -> None:
    peer = Peer()
    beats = peer.beats()
    with beats.claim(A, "x"), beats.claim(A, "y") as second, beats.claim(A, "y"), beats.claim(B, "z"):
        await peer.calls(4)
        assert {(at, tuple(ids)) for at, ids in peer.asked} == {(A, ("x", "y")), (B, ("z",))}
        assert not second.lost.done()
    peer.asked.clear()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert peer.asked == [], "nothing is held any more"


async def test_a_lease_is_certain_from_when_it_was_asked_for_and_not_from_the_answer() -> None:
    peer = Peer()
    with peer.beats().claim(A, "x") as claim:
        assert claim.until == 100
        await peer.calls(2)
        await asyncio.sleep(0)
        assert claim.until <= peer.now - 1 + 15


async def test_only_what_the_pod_holds_no_more_is_lost() -> None:
    peer = Peer()
    peer.answer = lambda ids: Beat({"y"}, 15)
    beats = peer.beats()
    with beats.claim(A, "x") as first, beats.claim(A, "y") as second:
        with pytest.raises(TransferError, match=r"10\.0\.0\.1:8000 no longer holds the KV of x"):
            await asyncio.wait_for(first.lost, 30)
        assert not second.lost.done()


async def test_a_pod_that_is_gone_loses_everything_at_once() -> None:
    peer = Peer()
    peer.answer = failing(PeerGone("nobody listens"))
    beats = peer.beats()
    with beats.claim(A, "x") as first, beats.claim(A, "y") as second:
        with pytest.raises(PeerGone, match="nobody listens"):
            await asyncio.wait_for(first.lost, 30)
        assert second.lost.done()
        assert len(peer.asked) == 1


async def test_a_pod_that_is_silent_for_a_while_is_dead_and_one_that_paused_is_not() -> None:
    peer = Peer()
    with peer.beats().claim(A, "x") as claim:
        peer.answer = failing(TransferError("the connection broke"))
        await peer.calls(3)
        peer.answer = lambda ids: Beat(ids, 15)
        await peer.calls(3)
        assert not claim.lost.done()
        peer.answer = failing(TransferError("the connection broke"))
        before = peer.now
        with pytest.raises(TransferError, match=r"has not answered for 8 s: the connection broke"):
            await asyncio.wait_for(claim.lost, 30)
        assert peer.now - before >= 7


async def test_an_answer_that_does_not_come_is_silence() -> None:
    async def ask(at: At, ids: Sequence[str]) -> Beat:
        return await asyncio.get_running_loop().create_future()

    with (
        Heartbeats(ask, beat=0.001, silence=0.05).claim(A, "x") as claim,
        pytest.raises(TransferError, match="has not answered"),
    ):
        await asyncio.wait_for(claim.lost, 30)


def test_a_pull_ends_before_its_blocks_can_be_anothers() -> None:
    assert SILENCE_SECONDS < HEARD_SECONDS
