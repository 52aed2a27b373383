"""Who is next: by priority and arrival, with small ones past large ones for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.schedule.queue import LOOK_BEHIND, MOST_OVERTAKEN, Departures, Queue


def queue(*entries: tuple[str, int, int]) -> Queue:
    """Of (key, blocks, priority)."""
    made = Queue()
    for key, blocks, priority in entries:
        made.put(key, blocks, priority=priority, prefix=(), work=0)
    return made


def run(made: Queue, room: int) -> list[str]:
    """Everybody who may go with `room` blocks, each taking its own from it."""
    gone = []
    for entry in made.candidates():
        if entry.blocks <= room:
            room -= entry.blocks
            made.take(entry)
            gone.append(entry.key)
    return gone


def test_lower_priority_values_first_then_arrival() -> None:
    made = queue(("a", 1, 0), ("b", 1, 5), ("c", 1, -1), ("d", 1, 0))
    assert run(made, 9) == ["c", "a", "d", "b"]
    assert len(made) == 0


def test_places_and_what_is_asked_for() -> None:
    made = queue(("a", 3, 0), ("b", 1, 5), ("c", 2, -1))
    assert [made.before(key) for key in "cab"] == [0, 1, 2]
    assert made.blocks == 6
    made.remove("a")
    assert (made.before("b"), made.blocks) == (1, 3)


def test_a_small_one_passes_a_large_one_of_its_own_class_only() -> None:
    made = queue(("large", 9, 0), ("small", 2, 0), ("less urgent", 1, 1))
    assert run(made, 3) == ["small"], "what is left is kept for the more urgent one"
    made.remove("large")
    assert run(made, 3) == ["less urgent"]


def test_the_search_for_a_smaller_one_is_bounded() -> None:
    made = queue(*((f"large{n}", 9, 0) for n in range(LOOK_BEHIND)), ("small", 1, 0))
    assert run(made, 3) == []


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    arrivals=st.lists(st.integers(0, 4), max_size=60),
    lifetimes=st.lists(st.integers(1, 5), min_size=1, max_size=10),
)
def test_nobody_starves(sizes: list[int], arrivals: list[int], lifetimes: list[int]) -> None:
    """Small requests keep coming, and still each is passed at most MOST_OVERTAKEN times and everybody runs."""
    made, capacity, running = Queue(), 6, {}
    pending, began = list(enumerate(sizes)), 0
    passed: dict[str, int] = {}
    for turn in range(1000):
        for _ in range(arrivals[turn] if turn < len(arrivals) else 1):
            if pending:
                number, size = pending.pop(0)
                passed[f"{number}"] = 0
                made.put(f"{number}", size, priority=0, prefix=(), work=0)
        running = {key: (ends, size) for key, (ends, size) in running.items() if ends > turn}
        room = capacity - sum(size for _, size in running.values())
        for key in run(made, room):
            running[key] = (turn + lifetimes[began % len(lifetimes)], sizes[int(key)])
            began += 1
            del passed[key]
            for other in passed:
                passed[other] += int(other) < int(key)
        assert max(passed.values(), default=0) <= MOST_OVERTAKEN
        if not pending and not made:
            return
    raise AssertionError(f"{sorted(passed)} never ran")


def test_the_seconds_until_a_queue_moves_on() -> None:
    moves = Departures()
    assert moves.seconds_for(10, 0.0, unknown=5, most=60) == 5
    moves.note(100.0, 1, left=12)
    moves.note(101.0, 1, left=11)
    moves.note(102.0, 2, left=10)
    assert moves.seconds_for(10, 104.0, unknown=5, most=60) == 10, "4 in 4 seconds"
    assert moves.seconds_for(10, 140.0, unknown=5, most=60) == 60, "a queue that stands still is slow"
    assert moves.seconds_for(1, 100.5, unknown=5, most=60) == 1
    moves.note(103.0, 3, left=0)
    moves.note(5000.0, 1, left=3)
    assert moves.seconds_for(3, 5001.0, unknown=5, most=60) == 5, "what was before a rest says nothing"
