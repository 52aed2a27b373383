"""Why a disruption budget has no room although nothing seems to be missing."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from glm52_operator.plan.pods import Pod, is_leaving, name

_REMEMBERED = datetime.timedelta(minutes=2)
"""How long the disruption controller waits to see an evicted pod leave (its DeletionTimeout)."""


def taken_for_leaving(budget: dict[str, Any], pods: Iterable[Pod]) -> str:
    """Which pods the budget takes for leaving that are not, and until when (UTC); empty where there is none.

    A budget knows evicted pods by name, and forgets one when it sees it leave. One that was faster, and was made again
    under its name, is counted as leaving for two minutes; nothing can be done meanwhile but wait.
    """
    evicted = budget.get("status", {}).get("disruptedPods") or {}
    here = sorted(name(pod) for pod in pods if name(pod) in evicted and not is_leaving(pod))
    if not here:
        return ""
    since = max(datetime.datetime.fromisoformat(evicted[each]) for each in here)
    until = (since + _REMEMBERED).astimezone(datetime.UTC)
    return f"the budget counts {', '.join(here)} as leaving, which was made again, until {until:%H:%M:%S} UTC"
