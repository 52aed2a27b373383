"""A day's traffic in minutes, and then the question what is left of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.engine.local.running import Running, pods, state
from tests.engine.soak.traffic import Clients

WORKERS = 8
WARM_SECONDS = 6.0
"""Traffic before the first count: thread pools and connections to peers are made on first use."""

POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""asyncio's pool of threads grows up to this, whenever so many calls meet; one thread a request would be far more."""

QUIET_SECONDS = 90.0
"""For leases and kept connections to end by themselves."""


@dataclass(frozen=True)
class Resources:
    """Of one process; memory in MiB."""

    files: int
    threads: int
    memory: int


@dataclass
class Report:
    seconds: float
    requests: dict[str, int]
    wrong: list[str]
    probes: int
    changed: list[str]
    left: dict[str, Any]
    before: dict[str, Resources]
    after: dict[str, Resources]
    prompt_tokens: int
    prefix_hits: int

    def leaks(self) -> list[str]:
        """Of files and threads; memory is told, not judged: allocators keep what they had."""
        return [
            f"{name}: {kind} were {getattr(before, kind)}, are {getattr(self.after[name], kind)}"
            for name, before in self.before.items()
            for kind, more in (("files", 0), ("threads", POOL_THREADS))
            if getattr(self.after[name], kind) > getattr(before, kind) + more
        ]

    def failures(self) -> list[str]:
        return [
            *self.wrong[:20],
            *self.changed[:20],
            *(f"left behind: {name} = {value}" for name, value in self.left.items()),
            *self.leaks(),
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def resources(pid: int) -> Resources:
    here = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines())
    return Resources(
        files=len(list((here / "fd").iterdir())),
        threads=int(status["Threads"]),
        memory=int(status["VmRSS"].split()[0]) >> 10,
    )


def held(running: Running) -> dict[str, Any]:
    """Whatever the router and the pods still have in hand; empty at rest."""
    router = state(running.url, running)
    found: dict[str, Any] = {"router in_flight": router["in_flight"]}
    for role, its in pods(running).items():
        for number, pod in enumerate(its):
            for name in ("in_flight", "running", "waiting", "kv_leases"):
                found[f"{role}-{number} {name}"] = pod[name]
            found[f"{role}-{number} blocks"] = pod["blocks_total"] - pod["blocks_free"]
    return {name: value for name, value in found.items() if value}


async def until(true: Callable[[], bool], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not true():
        if time.monotonic() > ends:
            return False
        await asyncio.sleep(0.25)
    return True


async def soak(running: Running, seconds: float, *, seed: int, say: Callable[[str], None], rest: float = 0) -> Report:
    """`seconds` of traffic with the probes asked all the time, then quiet; judges nothing itself.

    `rest`: seconds before the first count in which kept connections may end, so that the count is the strictest.
    """
    pids = {"local": running.process.pid, **running.children()}
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        clients = Clients(running.url, session, seed)
        expected = await clients.probe()
        await clients.run(WARM_SECONDS, workers=2 * WORKERS)
        await asyncio.sleep(rest)
        await until(lambda: not held(running), QUIET_SECONDS)
        before = {name: resources(pid) for name, pid in pids.items()}
        say(f"warm: {before}")
        began = time.monotonic()
        load = asyncio.ensure_future(clients.run(seconds, workers=WORKERS))
        probes, changed = await probe_all_the_time(clients, expected, load, say)
        await load
        spent = time.monotonic() - began
    done = dict(sorted(clients.tally.done.items()))
    report = Report(round(spent, 1), done, clients.tally.wrong, probes, changed, {}, before, before, 0, 0)

    def settled() -> bool:
        report.left = held(running)
        report.after = {name: resources(pid) for name, pid in pids.items()}
        return not report.left and not report.leaks()

    await until(settled, QUIET_SECONDS)
    prefill = pods(running)["prefill"]
    report.prefix_hits = sum(pod["prefix_cache_hits"] for pod in prefill)
    report.prompt_tokens = sum(pod["prompt_tokens_computed"] for pod in prefill) + report.prefix_hits
    return report


async def probe_all_the_time(
    clients: Clients, expected: list[str], load: asyncio.Future[None], say: Callable[[str], None]
) -> tuple[int, list[str]]:
    """Until the load has ended, and once more; how often, and every output that was not as at first."""
    probes, last = 0, False
    changed: list[str] = []
    while not last:
        last = load.done()
        now = await clients.probe()
        probes += 1
        changed += [f"was {a!r}, is {b!r}" for a, b in zip(expected, now, strict=True) if a != b]
        say(f"{sum(clients.tally.done.values())} requests, {probes} probes, {len(changed)} outputs changed")
        if not last:
            await asyncio.wait({load}, timeout=10)
    return probes, changed
