"""When the blocks of a pull are free; NIXL is a stand-in."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.pulls import LOOK_SECONDS, Job, Peer, Pull, PullCut, Pulls, TransferError
from glm52_engine.transfer.wire import Ask, Look, Message, Over, decode

REGION = Region(1 << 20, 8, 256)
PREFILL, OTHER = Peer("chat-prefill-0/a", b"", (REGION,)), Peer("chat-prefill-1/b", b"", (REGION,))


class Nixl:
    def __init__(self) -> None:
        self.said: list[Message] = []
        self.wrong: dict[str, str] = {}
        """Agents to which nothing can be sent, and why."""

    def add_remote_agent(self, metadata: bytes) -> None: ...

    def remove_remote_agent(self, name: str) -> None:
        self.wrong.pop(name)

    def send_notif(self, name: str, raw: bytes) -> None:
        if name in self.wrong:
            raise RuntimeError(self.wrong[name])
        self.said.append(decode(raw))


class World:
    def __init__(self) -> None:
        self.nixl = Nixl()
        self.pulls = Pulls(self.nixl, [REGION], b"metadata")
        self.now = 0.0

    def begin(self, peer: Peer = PREFILL, deadline: float = 60) -> Job:
        job = Job(Pull(peer, 0, [1, 2], 0, [3, 4], b"notice"), Future(), deadline)
        self.pulls.begin(job)
        return job

    def turn(self) -> None:
        self.now += LOOK_SECONDS
        self.pulls.turn(self.now)

    def asked(self) -> list[Ask]:
        return [said for said in self.nixl.said if isinstance(said, Ask)]


@pytest.fixture
def world() -> World:
    return World()


def test_a_pull_is_over_with_the_word_of_who_was_asked(world: World) -> None:
    job, other = world.begin(), world.begin(OTHER)
    assert [ask.runs for ask in world.asked()] == [[(1, 3, 2)], [(1, 3, 2)]]
    world.pulls.hear(OTHER.name, Over(number=job.number))
    world.pulls.hear(PREFILL.name, Over(number=0))
    assert not job.done.done()
    world.pulls.hear(PREFILL.name, Over(number=job.number))
    world.pulls.hear(OTHER.name, Over(number=other.number, error="no such rank"))
    assert job.done.result() == 2 * REGION.block_bytes
    assert str(other.done.exception()) == "reading from chat-prefill-1/b failed: no such rank"
    assert not world.pulls.open


def test_a_pull_that_is_cut_is_asked_after_until_it_is_over(world: World) -> None:
    job, other = world.begin(), world.begin(OTHER)
    world.pulls.cut(PREFILL.name, "the lease is lost")
    assert isinstance(job.done.exception(), PullCut)
    assert not other.done.done()
    world.turn()
    assert sorted(said.numbers for said in world.nixl.said[-2:] if isinstance(said, Look)) == [[1], [2]]
    assert not job.over.done()
    world.pulls.hear(PREFILL.name, Over(number=job.number, error="it was not asked for"))
    assert job.over.done()


def test_one_that_takes_too_long_is_cut(world: World) -> None:
    job = world.begin(deadline=2 * LOOK_SECONDS)
    world.turn()
    assert not job.done.done()
    world.turn()
    assert (type(job.done.exception()), job.over.done()) == (PullCut, False)


def test_a_connection_that_has_ended_ends_what_ran_on_it_and_the_next_one_is_another(world: World) -> None:
    cut, waited, other = world.begin(), world.begin(), world.begin(OTHER)
    world.pulls.cut(PREFILL.name, "the lease is lost")
    later = world.begin()
    world.nixl.wrong[PREFILL.name] = "NIXL_ERR_REMOTE_DISCONNECT"
    again = world.begin()
    assert cut.over.done()
    assert waited.over.done()
    assert type(later.done.exception()) is TransferError
    assert not again.done.done()
    assert not other.done.done()
    lives = [ask.life for ask in world.asked()]
    assert lives[0] == lives[1] == lives[3] < lives[4]


def test_what_fails_otherwise_frees_no_blocks(world: World) -> None:
    job = world.begin()
    world.nixl.wrong[PREFILL.name] = "NIXL_ERR_BACKEND"
    world.turn()
    assert not job.done.done()
    never_sent = world.begin()
    assert str(never_sent.done.exception()) == "cannot read from chat-prefill-0/a: NIXL_ERR_BACKEND"
    assert not job.over.done()
