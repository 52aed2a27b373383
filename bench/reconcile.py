"""What the operator costs an API server, and how soon it follows: requests, latencies, memory, restarts.

    python -m bench.reconcile                     200 deployments with their pods, then 2,000 without
    python -m bench.reconcile --rest-seconds 30 --many 0     a short look

One etcd, kube-apiserver and kube-controller-manager on loopback; a stand-in for kubelets runs the pods. The operator
runs as installed: the chart's permissions and its lease. Requests are counted in the API server's audit log by the
operator's user; those for its lease are counted apart, and so are watches, which are renewed by the clock and not by
work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.control import SETTLED_SECONDS, Rig, describe_machine, percentile, process_figures
from bench.report import reached
from e2e.controlplane.audit import Request, count
from e2e.controlplane.client import MERGE, path
from e2e.controlplane.operator import Process
from e2e.controlplane.space import deployment
from glm52_operator.reconcile.watch import FIRST_LIST_SECONDS

CREATED = 200
PATCHES = 50
BATCH = 200
IDLE = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}, "router": {"replicas": 0}}
"""Without pods: 2,000 deployments are about objects, and 6,000 pods about the machine."""

Row = dict[str, Any]


def costs(requests: Iterable[Request]) -> Row:
    """Requests by what they are for."""
    requests = list(requests)
    mine = [r for r in requests if r.resource != "leases"]
    work = [r for r in mine if r.verb != "watch"]
    return {
        "requests": len(work),
        "writes": sum(r.is_write for r in work),
        "lists": sum(r.verb == "list" for r in work),
        "watches": len(mine) - len(work),
        "lease": len(requests) - len(mine),
        "by_kind": dict(count(work).most_common(12)),
    }


async def apply_all(rig: Rig, namespace: str, names: Iterable[str], spec: Row) -> list[float]:
    """One client, one after the other; seconds of each."""
    taken = []
    for name in names:
        obj = deployment(name, **spec)
        obj["metadata"]["namespace"] = namespace
        began = time.monotonic()
        await rig.client.apply(obj)
        taken.append(time.monotonic() - began)
    return taken


def bare_applies(rig: Rig) -> Row:
    """The yardstick: as many server-side applies of the same objects by one client, with no operator there."""
    namespace = rig.namespace("bare")
    began = time.monotonic()
    taken = rig.loop.run(apply_all(rig, namespace, names(CREATED), {}), 600)
    seconds = time.monotonic() - began
    rig.remove_namespace(namespace)
    return {
        "what": "bare",
        "applies": CREATED,
        "seconds": round(seconds, 2),
        "apply_ms_p50": round(1000 * statistics.median(taken), 2),
    }


def names(number: int, first: int = 0) -> list[str]:
    return [f"chat-{n:04}" for n in range(first, first + number)]


def created(rig: Rig, operator: Process, namespace: str) -> Row:
    """Until every StatefulSet is there, and until every deployment is Ready."""
    rig.audit.mark()
    before = process_figures(operator.pid)
    began = time.monotonic()
    rig.loop.run(apply_all(rig, namespace, names(CREATED), {}), 600)
    applied = time.monotonic() - began
    rig.until_count("StatefulSet", namespace, 2 * CREATED)
    there = time.monotonic() - began
    rig.until_ready(namespace, CREATED)
    ready = time.monotonic() - began
    rig.until_settled()
    after = process_figures(operator.pid)
    children = rig.children(namespace)
    found = costs(rig.audit.since())
    return {
        "what": "created",
        "deployments": CREATED,
        "children": children,
        "seconds_applied": round(applied, 2),
        "seconds_statefulsets": round(there, 2),
        "seconds_ready": round(ready, 2),
        **found,
        "requests_per_deployment": round(found["requests"] / CREATED, 2),
        "requests_per_object": round(found["requests"] / (CREATED + children), 2),
        "cpu_seconds": round(after["cpu_seconds"] - before["cpu_seconds"], 2),
        "rss_mib": after["rss_mib"],
    }


def scaled(rig: Rig, operator: Process, namespace: str) -> Row:
    """From before the PATCH of the scale to the StatefulSet's new size, as a watch of the same client brings it."""
    rig.audit.mark()
    before = process_figures(operator.pid)
    patches, children = [], []
    for number in range(PATCHES):
        name = names(1, number * CREATED // PATCHES)[0]
        bare, child = rig.loop.run(_scale(rig, namespace, name, 2), 60)
        patches.append(1000 * bare)
        children.append(1000 * child)
        # Each alone: what is measured is one change, and not a queue.
        rig.until_ready(namespace, CREATED)
    rig.until_settled()
    after = process_figures(operator.pid)
    found = costs(rig.audit.since())
    return {
        "what": "scaled",
        "patches": PATCHES,
        **{f"patch_ms_p{p}": round(percentile(patches, p), 2) for p in (50, 99)},
        **{f"child_ms_p{p}": round(percentile(children, p), 2) for p in (50, 99)},
        "child_ms": [round(each, 2) for each in children],
        "patch_ms": [round(each, 2) for each in patches],
        **found,
        "requests_per_scale": round(found["requests"] / PATCHES, 2),
        "cpu_seconds": round(after["cpu_seconds"] - before["cpu_seconds"], 2),
    }


async def _scale(rig: Rig, namespace: str, name: str, replicas: int) -> tuple[float, float]:
    seen = rig.expect("StatefulSet", namespace, f"{name}-decode", lambda o: o["spec"]["replicas"] == replicas)
    began = time.monotonic()
    body = {"spec": {"replicas": replicas}}
    await rig.client.request("PATCH", path("GLM52Deployment", namespace, name, "scale"), body, content_type=MERGE)
    bare = time.monotonic() - began
    return bare, await asyncio.wait_for(seen, 60) - began


def rested(rig: Rig, operator: Process, seconds: float) -> Row:
    """Nothing is asked of it: what does it ask?"""
    # The list that follows a start is of the start, which may have been a moment ago.
    rig.until_settled(FIRST_LIST_SECONDS + SETTLED_SECONDS)
    rig.audit.mark()
    before = process_figures(operator.pid)
    # The measured window itself: there is nothing to wait for.
    time.sleep(seconds)
    after = process_figures(operator.pid)
    return {
        "what": "at rest",
        "seconds": seconds,
        **costs(rig.audit.since()),
        "cpu_seconds": round(after["cpu_seconds"] - before["cpu_seconds"], 2),
        "rss_mib": after["rss_mib"],
    }


def restarted(rig: Rig, operator: Process, namespace: str, times: int = 5) -> Row:
    """From the start of the process to the first child that follows an edit made while none ran."""
    taken = []
    rig.until_settled()
    rig.audit.mark()
    edited = names(times, CREATED // 2)
    for name in edited:
        operator.kill()
        rig.cluster.patch("GLM52Deployment", namespace, name, {"spec": {"prefill": {"replicas": 2}}})
        seen = rig.loop.run(rig.expecting("StatefulSet", namespace, f"{name}-prefill", _two))
        began = time.monotonic()
        operator.start()
        taken.append(rig.loop.run(rig.when(seen), 120) - began)
        operator.until_ready()
        rig.until_ready(namespace, CREATED)
        rig.until_settled()
    requests = rig.audit.since()
    others = [r for r in requests if r.is_write and r.resource != "leases" and not _about(r, edited)]
    return {
        "what": "restarted",
        "times": times,
        "seconds_p50": round(statistics.median(taken), 2),
        "seconds": [round(each, 2) for each in taken],
        "writes_to_unchanged": len(others),
        "examples": [str(r) for r in others[:5]],
        "reads_per_restart": sum(not r.is_write for r in requests) // times,
    }


def _two(obj: Row) -> bool:
    return bool(obj["spec"]["replicas"] == 2)


def _about(request: Request, edited: Iterable[str]) -> bool:
    return any(request.name.startswith(name) for name in edited)


def handed_over(rig: Rig, operator: Process, namespace: str) -> Row:
    """The same with a standby, as in an update of the operator: TERM to the first child that follows."""
    standby = rig.installed.start()
    name = names(1, CREATED - 1)[0]
    seen = rig.loop.run(rig.expecting("StatefulSet", namespace, f"{name}-prefill", _two))
    began = time.monotonic()
    operator.end()
    rig.cluster.patch("GLM52Deployment", namespace, name, {"spec": {"prefill": {"replicas": 2}}})
    taken = rig.loop.run(rig.when(seen), 120) - began
    return {
        "what": "handed over",
        "seconds": round(taken, 2),
        "standby_rss_mib": process_figures(standby.pid)["rss_mib"],
    }


def many(rig: Rig, operator: Process, number: int) -> list[Row]:
    """Batch after batch: does a deployment cost more when there are many?"""
    namespace = rig.namespace("many")
    rows = []
    for first in range(0, number, BATCH):
        rig.audit.mark()
        before = process_figures(operator.pid)
        began = time.monotonic()
        rig.loop.run(apply_all(rig, namespace, names(BATCH, first), IDLE), 600)
        rig.until_reported(namespace, first + BATCH)
        rig.until_settled()
        after = process_figures(operator.pid)
        found = costs(rig.audit.since())
        rows.append(
            {
                "what": "many",
                "deployments": first + BATCH,
                "seconds": round(time.monotonic() - began, 2),
                "requests_per_deployment": round(found["requests"] / BATCH, 2),
                "cpu_ms_per_deployment": round(1000 * (after["cpu_seconds"] - before["cpu_seconds"]) / BATCH, 2),
                "rss_mib": after["rss_mib"],
            }
        )
        print(rows[-1], flush=True)
    return rows


def reach(rows: list[Row]) -> list[Row]:
    """What the figures should be, and whether they are."""
    by = {row["what"]: row for row in rows}
    bare, made, scale, rest, again = (by[name] for name in ("bare", "created", "scaled", "at rest", "restarted"))
    found = [
        _at_most("requests for a deployment created", made["requests_per_deployment"], "", 10),
        _at_most("requests for an object created, children counted", made["requests_per_object"], "", 10),
        _at_most("requests for a scale", scale["requests_per_scale"], "", 6),
        _at_most("requests at rest", rest["requests"], "", 0),
        _at_most("writes at rest", rest["writes"], "", 0),
        _at_most("writes to unchanged objects after a restart", again["writes_to_unchanged"], "", 0),
        _at_most("scale latency p50 over the bare PATCH", scale["child_ms_p50"] / scale["patch_ms_p50"], "x", 3),
        _at_most("scale latency p99 over the bare PATCH", scale["child_ms_p99"] / scale["patch_ms_p99"], "x", 8),
        _at_most("200 created over 200 bare applies", made["seconds_statefulsets"] / bare["seconds"], "x", 2),
        _at_most("resident memory", rest["rss_mib"], "MiB", 150),
    ]
    batches = [row for row in rows if row["what"] == "many"]
    if len(batches) > 1:
        first, last = batches[0], batches[-1]
        for name in ("requests_per_deployment", "cpu_ms_per_deployment"):
            found.append(
                _at_most(f"{name} at {last['deployments']} over at {BATCH}", last[name] / first[name], "x", 1.25)
            )
    return found


def _at_most(name: str, value: float, unit: str, target: float) -> Row:
    return reached(name, round(value, 2), unit, target, value <= target)


def run(rest_seconds: float, number: int, folder: Path) -> list[Row]:
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        print({key: value for key, value in row.items() if key not in ("child_ms", "patch_ms")}, flush=True)

    with Rig(folder) as rig:
        note(bare_applies(rig))
        namespace = rig.namespace("pods")
        operator = rig.installed.start()
        note(created(rig, operator, namespace))
        note(scaled(rig, operator, namespace))
        note(restarted(rig, operator, namespace))
        if number:
            rows += many(rig, operator, number)
        note(rested(rig, operator, rest_seconds))
        note(handed_over(rig, operator, namespace))
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments.add_argument("--rest-seconds", type=float, default=300.0)
    arguments.add_argument("--many", type=int, default=2000, help="deployments of the last part; 0: leave it out")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(chosen.rest_seconds, chosen.many, Path(folder))
    result = {**describe_machine(), "date": time.strftime("%Y-%m-%d"), "rows": rows, "reach": reach(rows)}
    for each in result["reach"]:
        verdict = "holds " if each["holds"] else "MISSED"
        print(f"{verdict} {each['name']}: {each['value']} {each['unit']} (at most {each['target']})")
    (chosen.out / "reconcile.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, chosen.out / "reconcile.png")


def plot(result: Row, file: Path) -> None:
    try:
        import matplotlib.pyplot as plt  # type: ignore[import-not-found]
    except ImportError:
        print(f"no matplotlib, so {file} was not drawn")
        return
    by = {row["what"]: row for row in result["rows"]}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.5))
    scale = by["scaled"]
    for name, label in (("patch_ms", "the PATCH itself"), ("child_ms", "until the StatefulSet follows")):
        values = sorted(scale[name])
        left.plot(values, [100 * (n + 1) / len(values) for n in range(len(values))], label=label)
    left.set(xlabel="ms", ylabel="% of 50 scales", title="Scaling decode", xlim=(0, None))
    left.legend()
    created_row = by["created"]["by_kind"]
    kinds = sorted(created_row, key=created_row.get)
    middle.barh(kinds, [created_row[kind] / by["created"]["deployments"] for kind in kinds])
    middle.set(xlabel="requests per deployment", title="Creating 200 deployments")
    middle.tick_params(labelsize=7)
    batches = [row for row in result["rows"] if row["what"] == "many"]
    if batches:
        at = [row["deployments"] for row in batches]
        right.plot(at, [row["rss_mib"] for row in batches], label="resident MiB")
        right.plot(at, [row["cpu_ms_per_deployment"] for row in batches], label="CPU ms of a new deployment")
        right.set(xlabel="deployments", title="Many", ylim=(0, None))
        right.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
