"""One step: all decodes, then prompts within the budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.schedule import Pending, Planned, plan_step

entries = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda pair: (min(pair), max(pair))), min_size=1, max_size=20
)


@given(entries=entries, budget=st.integers(1, 64), least=st.integers(1, 16))
def test_a_plan(entries: list[tuple[int, int]], budget: int, least: int) -> None:
    sequences = [Pending(seat, computed, prompt) for seat, (computed, prompt) in enumerate(entries)]
    plan = {planned.seat: planned.tokens for planned in plan_step(sequences, budget=budget, least_prefill=least)}
    decodes = [entry for entry in sequences if entry.computed >= entry.prompt]
    prompts = [entry for entry in sequences if entry.computed < entry.prompt]
    assert all(plan[entry.seat] == 1 for entry in decodes), "a decode never waits for a prompt"
    assert all(1 <= plan[e.seat] <= e.prompt - e.computed for e in prompts if e.seat in plan)
    rows = sum(plan.values())
    assert rows <= max(budget, len(decodes) + least)
    if prompts:
        assert prompts[0].seat in plan, "the oldest prompt always gets on"
    if any(plan.get(e.seat, 0) < e.prompt - e.computed for e in prompts):
        assert rows >= budget, "room is left only when nobody wants it"


def test_prompts_share_a_step_in_order_of_arrival() -> None:
    sequences = [Pending(0, 10, 10), Pending(1, 4, 30), Pending(2, 0, 5), Pending(3, 0, 5)]
    assert plan_step(sequences, budget=29, least_prefill=1) == [Planned(0, 1), Planned(1, 26), Planned(2, 2)]
