"""One step: all decodes, then prompts within the budget."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_engine.schedule import Pending, Planned, plan_step

entries = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 50), st.integers(-2, 2)).map(
        lambda drawn: (min(drawn[:2]), max(drawn[:2]), drawn[2])
    ),
    min_size=1,
    max_size=20,
)


@given(entries=entries, budget=st.integers(1, 64), least=st.integers(1, 16))
def test_a_plan(entries: list[tuple[int, int, int]], budget: int, least: int) -> None:
    sequences = [Pending(seat, *entry) for seat, entry in enumerate(entries)]
    planned = plan_step(sequences, budget=budget, least_prefill=least)
    plan = {each.seat: each.tokens for each in planned}
    assert len(plan) == len(planned), "one chunk a sequence"
    decodes = [entry for entry in sequences if entry.left == 0]
    prompts = [entry for entry in sequences if entry.left]
    assert all(plan[entry.seat] == 1 for entry in decodes), "a decode never waits for a prompt"
    assert all(1 <= plan[e.seat] <= e.left for e in prompts if e.seat in plan)
    rows = sum(plan.values())
    room = max(budget - len(decodes), least)
    assert rows <= len(decodes) + room
    if prompts:
        assert plan[prompts[0].seat] >= min(prompts[0].left, room / 2), "the oldest prompt always gets on"
    if any(plan.get(e.seat, 0) < e.left for e in prompts):
        assert rows == len(decodes) + room, "room is left only when nobody wants it"


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    sequences = [Pending(0, 10, 10), Pending(1, 4, 100_000), Pending(2, 0, 50), Pending(3, 0, 5)]
    assert plan_step(sequences, budget=29, least_prefill=1) == [
        Planned(0, 1),
        Planned(1, 14),
        Planned(3, 5),
        Planned(2, 9),
    ]
    alone = [Pending(0, 10, 10), Pending(1, 4, 100_000)]
    assert plan_step(alone, budget=29, least_prefill=1) == [Planned(0, 1), Planned(1, 28)]


def test_an_urgent_prompt_goes_before_a_shorter_one() -> None:
    sequences = [Pending(0, 0, 90), Pending(1, 0, 5), Pending(2, 0, 20, priority=-1)]
    assert plan_step(sequences, budget=20, least_prefill=1) == [Planned(0, 10), Planned(2, 10)]


@settings(max_examples=40)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 30), st.integers(-1, 1)), min_size=1, max_size=6),
    budget=st.integers(1, 16),
)
def test_nobody_starves(prompts: list[tuple[int, int]], budget: int) -> None:
    """However many short and urgent prompts come after it, each is done when half the rows would have done it."""
    half = -(-budget // 2)
    running = [Pending(seat, 0, length, priority) for seat, (length, priority) in enumerate(prompts)]
    bounds, total = {}, 0
    for entry in running:
        total += -(-entry.prompt // half)
        bounds[entry.seat] = total
    for step in range(1, total + 1):
        running.append(Pending(100 + step, 0, 3, priority=-9))
        plan = {each.seat: each.tokens for each in plan_step(running, budget=budget, least_prefill=1)}
        moved = [Pending(e.seat, e.computed + plan.get(e.seat, 0), e.prompt, e.priority) for e in running]
        running = [entry for entry in moved if entry.left]
        assert all(bounds.get(entry.seat, total + 1) > step for entry in running)
