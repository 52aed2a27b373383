from __future__ import annotations

import pytest

from glm52_engine.route.choose import Candidate, choose
from glm52_engine.route.pools import Pools


@pytest.mark.parametrize(
    ("candidates", "tried", "chosen"),
    [
        pytest.param([], (), None, id="nobody"),
        pytest.param([("a", 3, False), ("b", 1, False)], (), "b", id="the least loaded"),
        pytest.param([("a", 0, True), ("b", 9, False)], (), "b", id="not the one that just failed"),
        pytest.param([("a", 0, False), ("b", 9, False)], ("a",), "b", id="not the one that was tried"),
        pytest.param([("a", 0, False), ("b", 9, True)], ("a",), "b", id="a suspect before a tried one"),
        pytest.param([("a", 0, True)], ("a",), "a", id="a tried one is better than none"),
    ],
)
def test_choice(candidates: list[tuple[str, int, bool]], tried: tuple[str, ...], chosen: str | None) -> None:
    found = choose([Candidate(*candidate) for candidate in candidates], tried=tried)
    assert (found.url if found else None) == chosen


def test_equals_take_turns() -> None:
    equals = [Candidate("b", 0), Candidate("a", 0), Candidate("c", 1)]
    turns = [choose(equals, turn=turn) for turn in range(4)]
    assert [found.url for found in turns if found] == ["a", "b", "a", "b"]


async def test_a_request_takes_a_turn_of_each_role() -> None:
    pools = Pools()
    pools.update("prefill", frozenset({"p0", "p1"}))
    pools.update("decode", frozenset({"d0", "d1"}))
    picked = [(pools.pick("prefill"), pools.pick("decode")) for _ in range(4)]
    for role in zip(*picked, strict=True):
        assert role[0] != role[1]
        assert role[:2] == role[2:]
