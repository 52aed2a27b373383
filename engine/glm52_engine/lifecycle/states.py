"""The life of a process as a pure state machine: Starting(phase) → Ready → Draining → Stopped. Time is an argument."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from glm52_engine.lifecycle.phases import Phase

STUCK_AFTER_SECONDS = 60.0
"""Work is queued and no step has finished for so long: the step loop is wedged, not busy."""


class Stage(enum.StrEnum):
    STARTING = "Starting"
    READY = "Ready"
    DRAINING = "Draining"
    STOPPED = "Stopped"


@dataclass(frozen=True, slots=True)
class State:
    """Where the process is. `refuse_at` and `deadline` are set by a drain and never move afterwards."""

    stage: Stage = Stage.STARTING
    phase: str = "starting the process"
    refuse_at: float = 0.0
    deadline: float = 0.0
    held: bool = False
    """Told not to start yet: nothing is wrong with it, however long that takes."""

    def enter(self, phase: str, *, held: bool = False) -> State:
        return replace(self, phase=phase, held=held) if self.stage is Stage.STARTING else self

    def ready(self) -> State:
        """A drain that came while starting stays a drain."""
        return replace(self, stage=Stage.READY, phase="", held=False) if self.stage is Stage.STARTING else self

    def drain(self, now: float, *, window: float, propagation: float) -> State:
        """The first drain fixes the times; every later one (preStop, then TERM, then another TERM) changes nothing."""
        if self.stage in (Stage.DRAINING, Stage.STOPPED):
            return self
        # Nobody was told of a process that was never ready, so there is no news to wait for.
        propagation = propagation if self.stage is Stage.READY else 0.0
        return State(Stage.DRAINING, "", refuse_at=now + propagation, deadline=now + propagation + window)

    def stop(self) -> State:
        return replace(self, stage=Stage.STOPPED, phase="")

    def admits(self, now: float, *, stay: bool = False) -> bool:
        """Whether a request that arrives now is served: early in a drain too, while routers learn of it.

        `stay`: there is no other pod for it, so it is served as long as the window lasts.
        """
        until = self.deadline if stay else self.refuse_at
        return self.stage is Stage.READY or (self.stage is Stage.DRAINING and now < until)

    def drained(self, now: float, in_flight: int) -> bool:
        return self.stage is Stage.DRAINING and now >= self.refuse_at and in_flight == 0

    def overdue(self, now: float) -> bool:
        return self.stage is Stage.DRAINING and now >= self.deadline

    def why_not(self, now: float, *, stay: bool = False) -> str:
        """Why a request is refused, for people; empty when it is not."""
        if self.admits(now, stay=stay):
            return ""
        if self.stage is Stage.STARTING:
            return f"starting: {self.phase}"
        return "draining" if self.stage is Stage.DRAINING else "stopped"


@dataclass(frozen=True, slots=True)
class Probe:
    status: int
    body: dict[str, Any]


def startup_probe(state: State, phases: Iterable[tuple[str, Phase]] = ()) -> Probe:
    """`phases`: host and phase of what is over."""
    probe = _startup(state)
    told = [{"host": host, **asdict(phase)} for host, phase in phases]
    return Probe(probe.status, probe.body | ({"phases": told} if told else {}))


def _startup(state: State) -> Probe:
    if state.stage is Stage.STARTING and state.held:
        # The budget of the startup probe is for starting; while a pod waits for its turn it must not be killed.
        return Probe(200, {"status": "held", "phase": state.phase})
    if state.stage is Stage.STARTING:
        return Probe(503, {"status": "starting", "phase": state.phase})
    return Probe(200, {"status": "started"})


def live_probe(stuck_seconds: float, failure: str = "", *, limit: float = STUCK_AFTER_SECONDS) -> Probe:
    """About progress, not about the HTTP loop: a long step is fine, an idle server is fine, a stalled one is not."""
    if failure:
        return Probe(503, {"status": "crashed", "reason": failure})
    if stuck_seconds > limit:
        reason = f"work is queued and no step has finished for {stuck_seconds:.0f} s"
        return Probe(503, {"status": "wedged", "reason": reason})
    return Probe(200, {"status": "live"})


def ready_probe(state: State, in_flight: int = 0) -> Probe:
    """Ready only in stage Ready: a draining process is unready at once, although it still serves what arrives.

    The operator reads here how far a drain is, so that it needs no secret for that.
    """
    if state.stage is Stage.READY:
        return Probe(200, {"status": "ready", "stage": state.stage.value})
    reason = f"starting: {state.phase}" if state.stage is Stage.STARTING else state.stage.value.lower()
    body = {"status": "not ready", "stage": state.stage.value, "reason": reason, "in_flight": in_flight}
    return Probe(503, body)
