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
    priority: int = 0

    @property
    def left(self) -> int:
        return self.prompt - self.computed


@dataclass(frozen=True, slots=True)
class Planned:
    """`tokens` of the sequence in `seat` take part in the step."""

    seat: int
    tokens: int


def plan_step(sequences: Sequence[Pending], *, budget: int, least_prefill: int) -> list[Planned]:
    """Decodes first, then chunks of prompts until `budget` rows are used; one chunk a sequence and step.

    Half of the prompts' rows go to the oldest one (`sequences` come in order of admission), the rest by priority, then
    to the prompts with the fewest tokens left: short ones do not wait for a long one, and since the oldest always gets
    on and everybody becomes the oldest, nobody starves, whatever the priorities: who holds a seat and blocks must get
    done. What the others do not need goes to the oldest.

    `least_prefill` rows are left to prompts even when decodes use up the budget, or a full house of decodes would
    starve them. All in tokens.
    """
    plan = [Planned(entry.seat, 1) for entry in sequences if entry.left <= 0]
    prompts = [entry for entry in sequences if entry.left > 0]
    if not prompts:
        return plan
    room = max(budget - len(plan), least_prefill)
    oldest, others = prompts[0], sorted(prompts[1:], key=lambda entry: (entry.priority, entry.left))
    own = min(oldest.left, -(-room // 2))
    room -= own
    chunks = []
    for entry in others:
        if room == 0:
            break
        chunks.append(Planned(entry.seat, min(entry.left, room)))
        room -= chunks[-1].tokens
    own += min(oldest.left - own, room)
    return [*plan, Planned(oldest.seat, own), *chunks]
