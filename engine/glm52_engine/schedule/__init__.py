"""Decisions of the engine, as pure functions and plain books."""

from glm52_engine.schedule.admission import Admission, Grant, Limits, blocks_for
from glm52_engine.schedule.plan import Pending, Planned, plan_step
from glm52_engine.schedule.queue import Departures

__all__ = ["Admission", "Departures", "Grant", "Limits", "Pending", "Planned", "blocks_for", "plan_step"]
