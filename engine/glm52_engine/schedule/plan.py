"""What one step computes: every decode, and as much prefill as the budget leaves. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pending:
    """A running sequence: `computed` tokens of its prompt have KV, `prompt` is its length, both in tokens."""

    seat: int
    computed: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Planned:
    """`tokens` of the sequence in `seat` take part in the step."""

    seat: int
    tokens: int


def plan_step(sequences: Sequence[Pending], *, budget: int, least_prefill: int) -> list[Planned]:
    """Decodes first, then prompts in order of arrival until `budget` rows are used; one chunk a sequence and step.

    `least_prefill` rows are left to prompts even when decodes use up the budget, or a full house of decodes would
    starve them. All in tokens.
    """
    plan = [Planned(entry.seat, 1) for entry in sequences if entry.computed >= entry.prompt]
    room = max(budget - len(plan), least_prefill)
    for entry in sequences:
        left = entry.prompt - entry.computed
        if left > 0 and room > 0:
            plan.append(Planned(entry.seat, min(left, room)))
            room -= plan[-1].tokens
    return plan
