"""Why a disruption budget has no room although nothing seems to be missing."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from glm52_operator.plan.pods import Pod, is_leaving, name

_REMEMBERED = datetime.timedelta(minutes=2)
"""How long the disruption controller waits to see an evicted pod leave (its DeletionTimeout)."""


def is_charged(budget: dict[str, Any], pod: str) -> bool:
    """Whether the budget has let this pod go already.

    An eviction first charges the budget, under the pod's name, and then deletes the pod. One whose client went away in
    between leaves the charge behind, and nothing else may go until the pod does, or two minutes are over.
    """
    return pod in (budget.get("status", {}).get("disruptedPods") or {})


def charged_for(budget: dict[str, Any], pods: Iterable[Pod]) -> str:
    """Which pods that do not leave the budget is charged for, and until when (UTC); empty where there is none."""
    stay = sorted(name(pod) for pod in pods if is_charged(budget, name(pod)) and not is_leaving(pod))
    if not stay:
        return ""
    charges = budget["status"]["disruptedPods"]
    since = max(datetime.datetime.fromisoformat(charges[each]) for each in stay)
    until = (since + _REMEMBERED).astimezone(datetime.UTC)
    whose = f"an eviction of {', '.join(stay)} that was not carried out"
    return f"the budget counts {whose} until {until:%H:%M:%S} UTC"
