from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable

import pytest

from glm52_engine.config import Hold
from glm52_engine.lifecycle import hold as module
from glm52_engine.lifecycle.hold import given_hold, wait_for_turn
from glm52_engine.lifecycle.life import Life
from glm52_engine.lifecycle.states import ready_probe, startup_probe

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


class Wall:
    """A clock that goes on only by what is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = NOW
        self.slept: list[float] = []
        monkeypatch.setattr(module.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += datetime.timedelta(seconds=seconds)


def life() -> Life:
    return Life(window=30, propagation=5)


def enter(held: Life) -> Callable[[str], None]:
    return lambda phase: held.enter(phase, held=True)


@pytest.mark.parametrize("given", [None, Hold(until=NOW), Hold(until=NOW - datetime.timedelta(hours=1))])
async def test_a_start_that_nobody_holds_begins_at_once(given: Hold | None) -> None:
    assert await wait_for_turn(enter(life()), given, lambda: NOW) is False


async def test_a_held_start_waits_for_its_time_and_is_no_start_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, held = Wall(monkeypatch), life()
    given = Hold(until=NOW + datetime.timedelta(seconds=70), why="crashed 3 times")
    assert await wait_for_turn(enter(held), given, lambda: wall.now) is True
    assert sum(wall.slept) == 70
    probe = startup_probe(held.state)
    assert (probe.status, probe.body["status"]) == (200, "held")
    assert "until 2026-01-02T00:01:10Z: crashed 3 times" in probe.body["phase"]
    assert ready_probe(held.state).status == 503
    held.enter("reading weights")
    assert startup_probe(held.state).status == 503


async def test_one_that_is_held_for_good_waits_until_it_is_ended() -> None:
    held = life()
    waits = asyncio.create_task(wait_for_turn(enter(held), Hold(why="crashed 8 times"), lambda: NOW))
    await asyncio.sleep(0)
    assert "until the specification is changed" in held.state.phase
    assert not waits.done()
    waits.cancel()


@pytest.mark.parametrize("text", ["", "{}x", '{"until": "soon"}', '{"until": "2026-01-02T00:00:00"}', '{"odd": 1}'])
def test_what_is_no_hold_holds_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM52_HOLD", text)
    assert given_hold() is None


def test_a_hold_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (Hold(until=NOW, why="a"), Hold(why="b")):
        monkeypatch.setenv("GLM52_HOLD", given.encode())
        assert given_hold() == given
