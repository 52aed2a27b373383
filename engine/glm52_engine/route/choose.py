"""Which pod gets the next request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready pod as the router sees it now. `suspect`: it failed a moment ago."""

    url: str
    in_flight: int
    suspect: bool = False


def choose(candidates: Sequence[Candidate], *, tried: Collection[str] = (), turn: int = 0) -> Candidate | None:
    """The least loaded pod; one that this request has not tried goes first, one that just failed goes last.

    `turn` rotates among equals. A tried pod is better than none: it may have come back.
    """
    if not candidates:
        return None

    def rank(candidate: Candidate) -> tuple[bool, bool, int]:
        return (candidate.url in tried, candidate.suspect, candidate.in_flight)

    best = min(map(rank, candidates))
    equals = sorted((c for c in candidates if rank(c) == best), key=lambda c: c.url)
    return equals[turn % len(equals)]
