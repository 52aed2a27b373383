"""What happened when: answers sorted by the marks between which they ran. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from e2e.traffic.request import Answer

START = "start"


@dataclass(frozen=True, slots=True)
class Window:
    """The time from one mark to the next; monotonic seconds."""

    name: str
    began: float
    ended: float
    answers: Sequence[Answer]
    """Those that began in it."""

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.failure is not None]

    @property
    def longest_gap(self) -> float:
        """The longest time in which no request succeeded, the edges of the window included; seconds."""
        times = sorted(a.ended for a in self.answers if a.failure is None and a.ended <= self.ended)
        edges = [self.began, *times, self.ended]
        return max(later - earlier for earlier, later in itertools.pairwise(edges))

    def __str__(self) -> str:
        kinds = Counter(answer.failure.value for answer in self.answers if answer.failure is not None)
        failures = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
        took = self.ended - self.began
        gap = self.longest_gap
        return f"{self.name}: {len(self.answers)} in {took:.0f} s, failed: {failures}, longest gap {gap:.1f} s"


def windows(marks: Sequence[tuple[float, str]], answers: Sequence[Answer], *, began: float, now: float) -> list[Window]:
    """`marks`: time and name in their order; what is before the first one is called START."""
    edges = [(began, START), *marks]
    ends = [*(time for time, _ in edges[1:]), now]
    return [
        Window(name, since, until, [a for a in answers if since <= a.began < until])
        for (since, name), until in zip(edges, ends, strict=True)
    ]
