"""status.drains and the conditions Draining and Stalled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glm52_operator.plan.drains import Drain, DrainOutcome, Phase
from glm52_operator.plan.endings import read_time
from glm52_operator.status.conditions import Verdict, timestamp

SHOWN_PODS = 5
MOST = 100
"""Entries that are written. Those left out are counted in the condition, and told of when they end."""


def read_drains(entries: Iterable[Mapping[str, Any]]) -> list[Drain]:
    """status.drains as it was written; what is not of its form is left out."""
    found = []
    for entry in entries:
        started, deadline = read_time(entry.get("startedAt")), read_time(entry.get("deadline"))
        if started is None or deadline is None or entry.get("phase") not in set(Phase):
            continue
        outcome = entry.get("outcome")
        found.append(
            Drain(
                pod=str(entry.get("pod", "")),
                uid=str(entry.get("uid", "")),
                node=str(entry.get("node", "")),
                phase=Phase(entry["phase"]),
                started=started,
                deadline=deadline,
                in_flight=entry.get("inFlight"),
                outcome=DrainOutcome(outcome) if outcome in set(DrainOutcome) else None,
                ended=read_time(entry.get("endedAt")),
                cut_off=int(entry.get("cutOff", 0)),
            )
        )
    return found


def write_drains(drains: Sequence[Drain]) -> list[dict[str, Any]]:
    return [_entry(drain) for drain in drains[:MOST]]


def _entry(drain: Drain) -> dict[str, Any]:
    fields = {
        "pod": drain.pod,
        "uid": drain.uid,
        "node": drain.node or None,
        "phase": drain.phase.value,
        "inFlight": drain.in_flight,
        "startedAt": timestamp(drain.started),
        "deadline": timestamp(drain.deadline),
        "outcome": drain.outcome.value if drain.outcome else None,
        "endedAt": timestamp(drain.ended) if drain.ended else None,
        "cutOff": drain.cut_off or None,
    }
    return {key: value for key, value in fields.items() if value is not None}


def draining(drains: Sequence[Drain]) -> Verdict:
    going = [drain for drain in drains if drain.phase is not Phase.ENDED]
    if not going:
        return Verdict(False, "NoneLeaving", "No pod is leaving.")
    each = [_going(drain) for drain in going[:SHOWN_PODS]]
    more = f" and {len(going) - SHOWN_PODS} more" if len(going) > SHOWN_PODS else ""
    count = "1 pod leaves" if len(going) == 1 else f"{len(going)} pods leave"
    return Verdict(True, "PodsLeaving", f"{count}: {', '.join(each)}{more}. Running requests finish first.")


def _going(drain: Drain) -> str:
    if drain.phase is Phase.DRAINING:
        left = "" if drain.in_flight is None else f"{drain.in_flight} in flight, "
        return f"{drain.pod} ({left}until {timestamp(drain.deadline)} at most)"
    return f"{drain.pod} ({drain.phase.value})"


def stalled(drains: Sequence[Drain]) -> Verdict | None:
    """The alarm, or None: pods that should be gone and are not."""
    stuck = [drain for drain in drains if drain.phase is Phase.STUCK]
    if not stuck:
        return None
    each = ", ".join(f"{d.pod} on node {d.node} (since {timestamp(d.deadline)})" for d in stuck[:SHOWN_PODS])
    more = f" and {len(stuck) - SHOWN_PODS} more" if len(stuck) > SHOWN_PODS else ""
    node = stuck[0].node
    return Verdict(
        True,
        "StuckTerminating",
        f"Pods outlive their grace period: {each}{more}. Either the node is gone, or a process hangs in the kernel, as "
        f"one that gives back pinned memory may after a SIGKILL. Look at kubectl describe node {node}. The operator "
        "never deletes a pod by force: its place is taken again only when it is gone. When it is certain that its "
        f"processes are (the node was removed, or restarted): kubectl delete pod {stuck[0].pod} --grace-period=0 "
        "--force.",
    )
