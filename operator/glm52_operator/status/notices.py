"""What a change of a status is worth telling as an event.

Only the two statuses are asked, so an unchanged state is never told again, however often and by whichever process it is
looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from glm52_operator import names
from glm52_operator.plan.events import Notice
from glm52_operator.status.compute import CHOSEN, CONDITIONS, PASSING
from glm52_operator.status.news import new_crashes, new_ends

_QUIET = PASSING | CHOSEN | {"ScaledToZero", "ConfigInvalid", "Complete"}
"""Reasons of a False condition that are no fault, or that another condition explains."""

Conditions = Mapping[str, Mapping[str, Any]]


def transition(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Notice]:
    """Events for the step from one written status to the next, causes first; `before` is empty for a new object."""
    old, new = _by_type(before), _by_type(after)
    scaled = list(_scaled(before, after))
    ends = [*_crashes(before, after), *_alarms(old, new), *_drains(before, after)]
    found = [*_config(old, new), *scaled, *ends, *_problems(old, new), *_ready(old, new, scaled=bool(scaled))]
    # An object that all roles need is refused to each of them in the same words.
    return list(dict.fromkeys(found))


def repaired(change: str) -> Notice:
    """A child that somebody else changed or deleted was put right."""
    return Notice("Warning", "Repaired", "Apply", change)


def _by_type(status: Mapping[str, Any]) -> Conditions:
    return {condition["type"]: condition for condition in status.get("conditions", [])}


def _changed(old: Conditions, new: Conditions, kind: str) -> bool:
    """Whether status or reason did; messages count pods and change all the time."""

    def state(of: Conditions) -> tuple[str, str] | None:
        return (of[kind]["status"], of[kind]["reason"]) if kind in of else None

    return kind in new and state(old) != state(new)


def _config(old: Conditions, new: Conditions) -> Iterator[Notice]:
    if not _changed(old, new, "ConfigValid"):
        return
    now = new["ConfigValid"]
    if now["status"] == "False":
        yield Notice("Warning", now["reason"], "Validate", now["message"])
    elif "ConfigValid" in old:
        yield Notice("Normal", "ConfigValid", "Validate", now["message"])


def _crashes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Notice]:
    for crash in reversed(new_crashes(before, after)):
        code = f", exit code {crash['exitCode']}" if "exitCode" in crash else ""
        node = f" on node {crash['node']}" if "node" in crash else ""
        yield Notice("Warning", crash["reason"], "Run", f"Pod {crash['pod']}{node}{code}: {crash['message']}")


def _alarms(old: Conditions, new: Conditions) -> Iterator[Notice]:
    for kind in ("Degraded", "Stalled"):
        if _changed(old, new, kind):
            yield Notice("Warning", new[kind]["reason"], "Reconcile", new[kind]["message"])
        elif kind in old and kind not in new:
            yield Notice("Normal", f"No{kind}", "Reconcile", f"Is over: {old[kind]['message']}")


def _drains(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Notice]:
    """Pods that ended alike are one event: a large one scaled to nothing would use up what there is of events."""
    by_outcome: dict[str, list[Mapping[str, Any]]] = {}
    for drain in new_ends(before, after):
        by_outcome.setdefault(str(drain.get("outcome", "Unknown")), []).append(drain)
    for outcome, drains in sorted(by_outcome.items()):
        names = ", ".join(sorted(str(drain["pod"]) for drain in drains))
        cut = sum(int(drain.get("cutOff", 0)) for drain in drains)
        tail = f" {cut} requests were cut off." if cut else ""
        kind: Literal["Normal", "Warning"] = "Normal" if outcome == "Drained" else "Warning"
        yield Notice(kind, outcome, "Drain", f"{_DRAINS[outcome]}: {names}.{tail}")


_DRAINS = {
    "Drained": "Left with nothing in flight",
    "DrainTimedOut": "Left when drain.windowSeconds were over",
    "Killed": "Was killed before it had ended by itself",
    "Crashed": "Crashed while it drained",
    "Unknown": "Was gone before its end was seen: deleted by force, or together with its node",
}


def _scaled(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Notice]:
    for role in names.ROLES:
        was, now = (_wanted(status.get(role, {})) for status in (before, after))
        if was and now and was != now:
            yield Notice("Normal", "Scaled", "Scale", f"{role}: scaled from {was} to {now} replicas.")


def _wanted(role: Mapping[str, Any]) -> str:
    """The second half of `ready`, "1/3"."""
    return str(role.get("ready", "")).rpartition("/")[2]


def _problems(old: Conditions, new: Conditions) -> Iterator[Notice]:
    """Parts that do not serve, for a reason that does not pass by itself; refusals of the API server are among them."""
    told = {new["ConfigValid"]["reason"]} if "ConfigValid" in new else set()
    parts = [kind for kind in (*CONDITIONS.values(), "Schedulable") if kind in new and new[kind]["reason"] not in told]
    told |= {new[kind]["reason"] for kind in parts}
    if "Progressing" in new and new["Progressing"]["reason"] not in told:
        parts.append("Progressing")
    for kind in parts:
        now = new[kind]
        if now["status"] == "False" and now["reason"] not in _QUIET and _changed(old, new, kind):
            yield Notice("Warning", now["reason"], "Reconcile", _without_counts(now["message"]))


def _without_counts(message: str) -> str:
    """Without "1/3 decode replicas ready. " before it: with each count the same trouble would be another event."""
    return re.sub(r"^\d+/\d+ [a-z ]+ ready\. ", "", message)


def _ready(old: Conditions, new: Conditions, *, scaled: bool) -> Iterator[Notice]:
    if "Ready" not in new:
        return
    now, was = new["Ready"], old.get("Ready", {}).get("status")
    if now["status"] == "True" and was != "True":
        yield Notice("Normal", "Ready", "Reconcile", now["message"])
    elif now["status"] != "True" and was == "True":
        passing = now["reason"] in PASSING
        if passing and scaled:
            return
        note = f"{now['reason']}: {now['message']}"
        yield Notice("Normal" if passing or now["reason"] in CHOSEN else "Warning", "NotReady", "Reconcile", note)
