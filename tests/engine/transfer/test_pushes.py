"""What the owner of KV says about its WRITEs, and what it begins; NIXL is a stand-in."""

from __future__ import annotations

from typing import Any

import pytest

from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.pushes import Pushes
from glm52_engine.transfer.wire import Ask, Look, Over, decode, encode

DECODE = "chat-decode-0/a"


class Handle:
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.state = "PROC"

    def release(self) -> None:
        self.state = "released"


class Nixl:
    """`down`: agents whose connection has ended."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self.down: set[str] = set()
        self.writes: list[Handle] = []
        self.said: list[tuple[str, Over]] = []

    def add_remote_agent(self, metadata: bytes) -> None:
        self.known.append(metadata.decode())

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)
        self.down.discard(name)

    def get_xfer_descs(self, spans: list[tuple[int, int, int]], kind: str) -> object:
        return spans

    def initialize_xfer(self, how: str, ours: object, theirs: object, peer: str) -> Handle:
        return Handle(peer)

    def transfer(self, handle: Handle) -> str:
        self.check(handle.peer)
        self.writes.append(handle)
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        self.check(handle.peer)
        return handle.state

    def send_notif(self, peer: str, raw: bytes) -> None:
        self.check(peer)
        said = decode(raw)
        assert isinstance(said, Over)
        if said.number:
            self.said.append((peer, said))

    def check(self, peer: str) -> None:
        if peer in self.down or peer not in self.known:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")


class World:
    def __init__(self) -> None:
        self.nixl, self.notices = Nixl(), list[bytes]()
        self.pushes = Pushes(self.nixl, [Region(1 << 20, 8, 256)], self.notices.append)

    def ask(self, number: int, life: int = 1, who: str = DECODE, **other: Any) -> None:
        fields: dict[str, Any] = {
            "rank": 0, "into": (1 << 30, 8, 256), "runs": [(1, 2, 3)], "metadata": who.encode(),
        }  # fmt: skip
        ask = Ask(number=number, life=life, notice=b"%d" % number, **{**fields, **other})
        said = decode(encode(ask))
        assert said == ask
        self.pushes.ask(who, ask)
        self.pushes.turn()

    def look(self, *numbers: int, life: int = 1) -> list[int]:
        """Those of which the end is told."""
        self.nixl.said.clear()
        self.pushes.look(DECODE, Look(life=life, numbers=list(numbers)))
        return [over.number for _, over in self.nixl.said if over.error]


@pytest.fixture
def world() -> World:
    return World()


def test_the_end_is_told_to_both_sides_when_the_last_byte_is_there_and_not_before(world: World) -> None:
    world.ask(1)
    assert (world.pushes.busy, world.notices, world.nixl.said, world.look(1)) == (True, [], [], [])
    world.nixl.writes[0].state = "DONE"
    world.pushes.turn()
    assert world.notices == [b"1"]
    assert world.nixl.said == [(DECODE, Over(number=1))]
    assert (world.pushes.busy, world.nixl.writes[0].state) == (False, "released")


@pytest.mark.parametrize("wrong", [{"rank": 1}, {"runs": [(7, 0, 2)]}, {"runs": [(0, 7, 2)]}, {"runs": [(-1, 0, 1)]}])
def test_blocks_that_do_not_exist_are_told_and_nothing_is_sent(world: World, wrong: dict[str, Any]) -> None:
    world.ask(1, **wrong)
    assert [over.number for _, over in world.nixl.said if over.error] == [1]
    assert world.nixl.writes == []


def test_what_was_said_to_be_over_before_it_was_heard_of_does_not_begin(world: World) -> None:
    world.ask(1)
    assert world.look(1, 2) == [2]
    world.ask(2)
    assert len(world.nixl.writes) == 1
    world.ask(3)
    assert len(world.nixl.writes) == 2


def test_nothing_is_told_on_another_connection_than_the_one_with_the_bytes(world: World) -> None:
    world.ask(1)
    world.nixl.down.add(DECODE)
    world.pushes.turn()
    assert (world.nixl.known, world.notices, world.nixl.said) == ([], [], [])
    # What was asked before that was seen is of the old one, too.
    world.ask(2)
    assert world.look(1, 2) == []
    world.ask(3, life=2)
    assert world.look(1, 2, life=1) == []
    assert len(world.nixl.writes) == 2
    assert world.look(1, life=2) == [1], "the peer has no old one any more"


def test_on_a_new_connection_nothing_begins_while_something_runs_on_the_old_one(world: World) -> None:
    world.ask(1)
    world.ask(2, life=2)
    world.pushes.turn()
    assert (len(world.nixl.writes), world.look(1, 2, life=2)) == (1, [])
    world.nixl.down.add(DECODE)
    world.pushes.turn()
    world.pushes.turn()
    assert [handle.state for handle in world.nixl.writes] == ["released", "PROC"]
    assert world.nixl.known == [DECODE]


def test_a_write_that_failed_alone_is_never_said_to_be_over(world: World) -> None:
    world.ask(1)
    world.nixl.writes[0].state = "ERR"
    world.pushes.turn()
    assert (world.nixl.said, world.notices, world.look(1)) == ([], [], [])
    world.ask(2)
    world.nixl.writes[1].state = "DONE"
    world.pushes.turn()
    assert world.notices == [b"2"]


def test_peers_that_are_gone_are_forgotten_when_another_one_comes(world: World) -> None:
    world.ask(1)
    world.nixl.writes[0].state = "DONE"
    world.pushes.turn()
    world.nixl.down.add(DECODE)
    world.ask(1, who="chat-decode-1/b")
    assert world.nixl.known == ["chat-decode-1/b"]


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"kind": "ask"}', b'{"kind": "stop"}', b"\xff"])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode(raw)
