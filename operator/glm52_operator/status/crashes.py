"""status.crashes, status.restarts and the condition Degraded: what crashed, and what is done about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glm52_operator.plan.endings import HOST_LOST, Ending, read_time
from glm52_operator.plan.escalation import Crash, CrashPolicy, Series, together
from glm52_operator.status.conditions import Verdict, timestamp

KEPT = 10
"""Crashes whose evidence is kept, the newest."""

SHOWN = 400
"""Characters of the last crash's evidence in the condition's message; all of it stands in status.crashes."""


def keep_evidence(
    previous: Iterable[Mapping[str, Any]], seen: Iterable[Ending], counted: Iterable[Series] = ()
) -> list[dict[str, Any]]:
    """status.crashes: newest first, each once, also when its pod is gone.

    Times are whole seconds: of two crashes in the same one the newer is that which was not known before.

    Of hosts that fell together, as `counted` has them, those that fell for another one are left out: a replica of 64
    hosts would push all other evidence out with one crash.
    """
    known = {str(entry["id"]): dict(entry) for entry in previous if "id" in entry}
    before = list(known)
    groups = [[crash.id for crash in each] for series in counted for each in together(series.crashes)]
    current = {number for group in groups for number in group}
    for ending in seen:
        # One that is not counted any more was left out when it was.
        if ending.is_crash and (ending.reason != HOST_LOST or ending.id in current):
            known.setdefault(ending.id, _evidence(ending))
    for group in groups:
        _leave_the_cause(known, group)
    newest_first = [*reversed([number for number in known if number not in before]), *(n for n in before if n in known)]
    return sorted((known[number] for number in newest_first), key=lambda entry: str(entry["time"]), reverse=True)[:KEPT]


def _leave_the_cause(known: dict[str, dict[str, Any]], group: Iterable[str]) -> None:
    """Takes out of `known` who fell for another one; where that one has told nothing, who can say most of it stays."""
    entries = [known[number] for number in group if number in known]
    causes = [entry for entry in entries if entry["reason"] != HOST_LOST]
    lost = [entry for entry in entries if entry["reason"] == HOST_LOST]
    witness = min(lost, key=lambda entry: ("rank" not in entry, entry["time"], entry["id"]), default=None)
    for entry in lost:
        if causes or entry is not witness:
            del known[entry["id"]]
    if len(causes) == 1 and witness is not None and "rank" in witness:
        # Its leader knows which rank it was; one that was killed could not say so.
        causes[0].setdefault("rank", witness["rank"])


def _evidence(ending: Ending) -> dict[str, Any]:
    words = ending.words
    fields = {
        "id": ending.id,
        "pod": ending.pod,
        "node": ending.node or None,
        "rank": words.rank if words else None,
        "exitCode": ending.exit_code,
        "reason": ending.reason,
        "marker": (words.marker if words else "") or None,
        "time": timestamp(ending.time),
        "revision": ending.revision or None,
        "message": ending.message,
    }
    return {key: value for key, value in fields.items() if value is not None}


def read_series(entries: Iterable[Mapping[str, Any]]) -> list[Series]:
    """status.restarts as it was written; what is not of its form is left out."""
    return [
        Series(
            replica=str(entry.get("replica", "")),
            basis=str(entry.get("basis", "")),
            crashes=tuple(_crashes(entry.get("crashes") or [])),
            forgiven=frozenset(entry.get("forgiven") or []),
            latched=bool(entry.get("latched")),
        )
        for entry in entries
    ]


def _crashes(entries: Iterable[Mapping[str, Any]]) -> Iterable[Crash]:
    for entry in entries:
        time = read_time(entry.get("time"))
        if time is not None:
            yield Crash(str(entry.get("id")), str(entry.get("pod")), time)


def write_series(found: Iterable[Series], policy: CrashPolicy) -> list[dict[str, Any]]:
    return [_entry(series, policy) for series in found]


def _entry(series: Series, policy: CrashPolicy) -> dict[str, Any]:
    until = series.held_until(policy)
    return {
        "replica": series.replica,
        "count": len(series.incidents),
        **({"heldUntil": timestamp(until)} if until else {}),
        "latched": series.latched,
        "basis": series.basis,
        "crashes": [{"id": c.id, "pod": c.pod, "time": timestamp(c.time)} for c in series.crashes],
        **({"forgiven": sorted(series.forgiven)} if series.forgiven else {}),
    }


def degraded(found: Sequence[Series], evidence: Sequence[Mapping[str, Any]], policy: CrashPolicy) -> Verdict | None:
    """The alarm, or None: replicas that are not started any more."""
    latched = [series for series in found if series.latched]
    if not latched:
        return None
    names = ", ".join(series.replica for series in latched)
    limit = f"{policy.max_restarts} times within {policy.reset.total_seconds():.0f} s"
    # The name of an engine replica is a pod's, and ends with its number.
    held = [series for series in latched if series.replica.rpartition("-")[2].isdigit()]
    done = "not started any more" if held == latched else "not started any more, but for routers"
    return Verdict(
        True,
        "CrashLoop",
        f"Crashed {limit} and {done}: {names}. {_last(evidence, latched)}The other replicas are not concerned. Look at "
        "status.crashes, correct the cause, and change the specification to have it tried again: the correction "
        "itself, or spec.restart.",
    )


def _last(evidence: Sequence[Mapping[str, Any]], latched: Sequence[Series]) -> str:
    pods = {crash.pod for series in latched for crash in series.crashes} | {series.replica for series in latched}
    entry = next((entry for entry in evidence if entry.get("pod") in pods), None)
    if entry is None:
        return ""
    where = f"pod {entry['pod']}" + (f" on node {entry['node']}" if "node" in entry else "")
    code = f", exit code {entry['exitCode']}" if "exitCode" in entry else ""
    told = str(entry["message"])
    told = told if len(told) <= SHOWN else f"{told[: SHOWN - 1]}…"
    return f"The last one, {entry['time']}, {where} ({entry['reason']}{code}): {told}. "
