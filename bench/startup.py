"""How long a leader waits for its rank hosts: one after the other, and all at once.

    python -m bench.startup                 EP16, EP32 and EP64, then a real replica of 4 ranks on 2 hosts
    python -m bench.startup --repeats 1

Every rank host is a process of its own, with the product's door, handshake and control connection. Its accelerator part
(weights, pinning, graphs) is simulated: between the leader's acceptance and its Loaded a host sleeps, for a time drawn
once per host from a log-normal distribution (median 2 s, sigma 0.35, seeded). The real replica's hosts run the
preset tiny on the CPU and simulate nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.report import reached
from glm52_engine.lifecycle.start import InternalToken, bind
from glm52_engine.ranks.connect import Remote, connect_hosts
from glm52_engine.ranks.link import LinkLost
from glm52_engine.ranks.messages import Agent, Loaded, Terms
from glm52_engine.ranks.reception import Reception
from glm52_engine.ranks.spans import RankHost, RankSpan

RANKS_PER_HOST = 8
SIZES = (16, 32, 64)
MEDIAN_SECONDS, SIGMA, SEED = 2.0, 0.35, 64
LOOPBACK = "127.0.0.1"
REACH = 1.1
"""Concurrent against the slowest host alone."""

PARTING_SECONDS = 0.5
"""For every host to notice that its leader is gone, so that no run finds one that still serves the last."""

Row = dict[str, Any]


def delays_of(world: int) -> list[float]:
    """Seconds of each rank host's simulated part; the leader's own ranks are none of them."""
    chosen = random.Random(f"{SEED} {world}")
    hosts = world // RANKS_PER_HOST - 1
    return [round(chosen.lognormvariate(0, SIGMA) * MEDIAN_SECONDS, 3) for _ in range(hosts)]


def terms_of(world: int) -> Terms:
    counts = (RANKS_PER_HOST,) * (world // RANKS_PER_HOST)
    return Terms("0" * 64, counts, 64, 1 << 20, 4096, 96, 131_072, 8192)


async def serve(fd: int, world: int, index: int, secret: str, seconds: float) -> None:
    """A rank host whose load is a sleep; it takes leader after leader until it is killed."""
    reception = Reception(RankSpan("", RANKS_PER_HOST * index, RANKS_PER_HOST), InternalToken((secret,)))
    reception.terms.set_result(terms_of(world))
    await reception.open(socket.socket(fileno=fd))
    print("listening", flush=True)
    while True:
        link = await reception.leader()
        await asyncio.sleep(seconds)
        try:
            await link.send(Loaded(Agent("", "", (), 0)))
            while True:
                await link.receive()
        except LinkLost:
            await reception.part()


class Hosts:
    """The rank hosts of one size, each its own process, ready for a leader."""

    def __init__(self, world: int) -> None:
        self.world, self.secret = world, secrets.token_hex(16)
        self.delays = delays_of(world)
        self.addresses: list[RankHost] = []
        self._processes: list[subprocess.Popen[str]] = []
        for index, seconds in enumerate(self.delays, 1):
            listener = bind(LOOPBACK, 0)
            self.addresses.append(RankHost(LOOPBACK, listener.getsockname()[1], RANKS_PER_HOST))
            args = ["--as-host", str(listener.fileno()), str(world), str(index), self.secret, str(seconds)]
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.startup", *args],
                    pass_fds=[listener.fileno()], stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
            listener.close()
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "listening":
                raise RuntimeError("a rank host ended before it listened")

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


async def loaded(remote: Remote) -> None:
    while not isinstance(await remote.link.receive(), Loaded):
        pass


async def concurrent(hosts: Hosts) -> float:
    began = time.monotonic()
    remotes = await connect_hosts(RANKS_PER_HOST, hosts.addresses, terms_of(hosts.world), hosts.secret, seconds=60)
    await asyncio.gather(*(loaded(remote) for remote in remotes))
    taken = time.monotonic() - began
    await asyncio.gather(*(remote.link.close() for remote in remotes))
    return taken


async def serial(hosts: Hosts) -> list[float]:
    """Seconds of each host alone; their sum is what one after the other takes."""
    taken = []
    for index, address in enumerate(hosts.addresses):
        began = time.monotonic()
        first = RANKS_PER_HOST * (index + 1)
        (remote,) = await connect_hosts(first, [address], terms_of(hosts.world), hosts.secret, seconds=60)
        await loaded(remote)
        taken.append(time.monotonic() - began)
        await remote.link.close()
    return taken


def measured(world: int, repeats: int) -> Row:
    hosts = Hosts(world)
    try:
        alone, together = [], []
        for _ in range(repeats):
            alone.append(asyncio.run(serial(hosts)))
            time.sleep(PARTING_SECONDS)
            together.append(asyncio.run(concurrent(hosts)))
            time.sleep(PARTING_SECONDS)
    finally:
        hosts.end()
    slowest = statistics.median(max(each) for each in alone)
    row = {
        "what": f"EP{world}",
        "ranks": world,
        "hosts": world // RANKS_PER_HOST,
        "rank_hosts": len(hosts.delays),
        "simulated_seconds": hosts.delays,
        "serial_seconds": round(statistics.median(sum(each) for each in alone), 3),
        "concurrent_seconds": round(statistics.median(together), 3),
        "concurrent_each": [round(each, 3) for each in together],
        "slowest_host_seconds": round(slowest, 3),
        "over_slowest": round(statistics.median(together) / slowest, 4),
    }
    print(json.dumps(row), flush=True)
    return row


def real(folder: Path) -> Row:
    """`glm52-engine rank-host` and a leader, from spawned processes to the first steps of all ranks."""
    from glm52_engine.checkpoint import make_checkpoint
    from tests.engine.ranks.processes import replica

    make_checkpoint("tiny", folder / "checkpoint")
    with replica(folder, folder / "checkpoint", ranks=2) as made:
        began = time.monotonic()
        leader, _ = made.start()
        taken = time.monotonic() - began
        phases = leader.says("up")["up"]
    row = {"what": "real, preset tiny on the CPU", "ranks": 4, "hosts": 2, "up_seconds": round(taken, 2)}
    named = {("leader" if host == "local" else "rank host"): each for host, each in phases.items()}
    row["phases"] = {
        host: {phase["name"]: [phase["began"], phase["ended"]] for phase in each} for host, each in named.items()
    }
    print(json.dumps(row), flush=True)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--as-host", nargs=5, metavar=("FD", "WORLD", "INDEX", "SECRET", "SECONDS"))
    chosen = arguments.parse_args(argv)
    if chosen.as_host:
        fd, world, index, secret, seconds = chosen.as_host
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        asyncio.run(serve(int(fd), int(world), int(index), secret, float(seconds)))
        return
    rows = [measured(world, chosen.repeats) for world in SIZES]
    reach = [
        reached(
            f"EP{row['ranks']}: all hosts at once against the slowest host alone",
            row["over_slowest"],
            "×",
            REACH,
            row["over_slowest"] <= REACH,
        )
        for row in rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows.append(real(Path(folder)))
    result = {**machine(), "date": time.strftime("%Y-%m-%d"), "rows": rows, "reach": reach}
    (chosen.out / "startup.json").write_text(json.dumps(result, indent=1) + "\n")
    for each in reach:
        print(f"{'holds ' if each['holds'] else 'MISSED'} {each['name']}: {each['value']} (at most {each['target']})")
    plot(result, chosen.out / "startup.png")


def machine() -> Row:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "machine": {"cpu": model, "cores": len(os.sched_getaffinity(0))},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "delays": {"distribution": "log-normal", "median_seconds": MEDIAN_SECONDS, "sigma": SIGMA, "seed": SEED},
    }


def plot(result: Row, file: Path) -> None:
    try:
        import matplotlib.pyplot as plt  # type: ignore[import-not-found]
    except ImportError:
        print(f"no matplotlib, so {file} was not drawn")
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), width_ratios=(1, 1.3))
    rows = [row for row in result["rows"] if "over_slowest" in row]
    for shift, key, label in (
        (-0.27, "serial_seconds", "one after the other"),
        (0.0, "concurrent_seconds", "all at once"),
        (0.27, "slowest_host_seconds", "slowest host alone"),
    ):
        bars = left.bar([n + shift for n in range(len(rows))], [row[key] for row in rows], 0.25, label=label)
        left.bar_label(bars, fmt="%.2f", fontsize=7)
    left.set_xticks(range(len(rows)), [f"{row['what']}\n{row['rank_hosts']} rank hosts" for row in rows])
    left.set(ylabel="seconds until all hosts are loaded", title="Simulated accelerators")
    left.legend()
    whole = next(row for row in result["rows"] if "phases" in row)
    spans = [(f"{host}: {name}", *span) for host, each in whole["phases"].items() for name, span in each.items()]
    for place, (_, began, ended) in enumerate(reversed(spans)):
        right.barh(place, max(ended - began, 0.02), left=began)
    right.set_yticks(range(len(spans)), [name for name, _, _ in reversed(spans)], fontsize=7)
    right.set(xlabel="seconds since the process began", title="Real: 4 ranks on 2 hosts, preset tiny, 2 cores")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
