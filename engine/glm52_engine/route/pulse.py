"""Whether a pod that says nothing is frozen: a process that is stopped keeps its connections open. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

QUIET_SECONDS = 5.0
"""A pod is asked when nothing has come from it for so long: one that streams is heard many times a second."""

ANSWER_SECONDS = 5.0
"""For an answer of any kind. What a pod computes keeps none from coming: it runs on other threads."""

FROZEN_SECONDS = 30.0
"""Nothing has come for so long, questions included: no sooner than its kubelet would have it killed for the same."""

UNANSWERED = 3
"""Questions in a row. Time alone would condemn every pod after the router itself was stopped for a while."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """Of one pod with calls in progress; times are seconds of one clock. `heard`: when anything came from it last."""

    heard: float
    asked: float
    unanswered: int = 0

    @classmethod
    def begin(cls, now: float) -> Pulse:
        return cls(heard=now, asked=now)

    def answered(self, now: float) -> Pulse:
        return replace(self, heard=now, unanswered=0)

    def ask(self, now: float) -> Pulse:
        return replace(self, asked=now)

    def silent(self) -> Pulse:
        """A question that was not answered in its time."""
        return replace(self, unanswered=self.unanswered + 1)

    def is_due(self, now: float) -> bool:
        """Whether it is to be asked now."""
        return now - max(self.heard, self.asked) >= QUIET_SECONDS

    def is_frozen(self, now: float) -> bool:
        return now - self.heard >= FROZEN_SECONDS and self.unanswered >= UNANSWERED
