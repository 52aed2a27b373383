"""HiSparse on one GPU: rows fetched from pinned host memory, how much of that compute hides, how fast memory is pinned.

    python -m bench.hisparse_gather [--out docs/benchmarks] [--gib 32]

Selections are made, since those of random weights have no locality: of a row's 2,048 selected tokens a given share is
new in each step, drawn from its context of 32,768. What is missed is counted by the kernels themselves. The compute
that fetches hide behind is reading weights, as long a layer as 32 experts of GLM-5.2 take.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.decode import median_ms
from bench.report import reached
from glm52_engine.kernels import hisparse, linear
from glm52_engine.kernels.residency import HostRows, Plan, Residency
from glm52_engine.kv.hisparse import HotPool, HotStep
from glm52_engine.kv.pinning import PIECE_BYTES, Cuda, gpu_place, host_slab, pin

GIB = 1 << 30
BLOCK, LAYERS, TOP_K, CONTEXT, SEATS = 64, 4, 2048, 32_768, 32
ROWS = {"bf16": 1152, "fp8": 656}
COUNTS = (256, 2048, 16_384, 65_536)
NEW = (0.001, 0.05, 0.2, 1.0)
LAYER_BYTES = 5 * GIB // 2
"""Weights that one layer's compute reads: 32 experts in bfloat16 and the rest."""


def pinning(size: int) -> tuple[Any, list[dict[str, Any]]]:
    """A slab pinned by our code (twice: a virtual machine gives memory on first use), and by one thread of torch."""
    rows = []
    place = gpu_place(0)
    pinned = None
    for attempt in ("first", "again"):
        if pinned is not None:
            rows[-1]["unpin_s_gib"] = round(pinned.release() / (size / GIB), 4)
            del pinned
        pinned = pin(host_slab(size), Cuda(0), place=place)
        each = pinned.seconds / (size / GIB)
        rows.append({"how": f"glm52, {attempt}", "gib": size // GIB, "place": str(place), "s_gib": round(each, 4)})
        print(rows[-1], flush=True)
    began = time.perf_counter()
    by_torch = torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=True)
    rows.append({"how": "torch, one thread", "gib": 4, "s_gib": round((time.perf_counter() - began) / 4, 4)})
    print(rows[-1], flush=True)
    del by_torch
    return pinned, rows


def link(slab: torch.Tensor) -> dict[str, float]:
    """GB/s of plain copies of 256 MiB."""
    here = slab[:PIECE_BYTES]
    there = torch.empty_like(here, device="cuda")
    down, _ = median_ms(lambda: there.copy_(here, non_blocking=True), 20)
    up, _ = median_ms(lambda: here.copy_(there, non_blocking=True), 20)
    size = here.nbytes
    return {"host_to_device_gb_s": round(size / down / 1e6, 1), "device_to_host_gb_s": round(size / up / 1e6, 1)}


def host_rows(slab: torch.Tensor, row_bytes: int) -> HostRows:
    block = (LAYERS * BLOCK + 16) * row_bytes
    blocks = slab.nbytes // block
    return HostRows(slab[: blocks * block].view(blocks, block), BLOCK, row_bytes)


def replayed(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def gathers(host: HostRows, count: int, **options: int) -> float:
    """GB/s of `count` random rows, each replay with other ones."""
    residency = Residency.empty(groups=1, seats=1, rows=8, slots=8, device="cuda")
    hot = torch.zeros(1, count + 1, host.row_bytes, dtype=torch.uint8, device="cuda")
    # A graph does not keep what it reads.
    graphs, plans = [], []
    for _ in range(8):
        plan = Plan.empty(batch=1, top_k=count, groups=1, device="cuda")
        plan.slots.random_(0, host.slots)
        plan.rows.copy_(torch.randperm(count, device="cuda", dtype=torch.int32))
        plan.count.fill_(count)

        def run(plan: Plan = plan) -> None:
            hisparse.gather(residency, 0, plan, host, hot, range(1), **options)

        graphs.append(replayed(run))
        plans.append(plan)
        place = plan.rows[:64].long()
        slot = plan.slots[:64].long().cpu()
        want = host.layer(0)[slot // BLOCK, slot % BLOCK]
        assert torch.equal(hot[0][place].cpu(), want), "a gathered row is not the host's"
    turn = iter(range(1 << 30))
    ms, _ = median_ms(lambda: graphs[next(turn) % len(graphs)].replay(), 48)
    return count * host.row_bytes / ms / 1e6


class Selections:
    """For each step of each seat TOP_K distinct slots, of which the share `new` were not in the step before."""

    def __init__(self, host: HostRows, new: float, steps: int) -> None:
        blocks = CONTEXT // BLOCK
        table = torch.randperm(host.tensor.shape[0])[: SEATS * blocks].view(SEATS, blocks)
        chosen = torch.stack([torch.randperm(CONTEXT)[:TOP_K] for _ in range(SEATS)])
        change = max(1, round(TOP_K * new))
        made = []
        for _ in range(steps):
            made.append(self._slots(table, chosen))
            for seat in range(SEATS):
                others = torch.ones(CONTEXT, dtype=torch.bool)
                others[chosen[seat]] = False
                fresh = others.nonzero()[:, 0]
                at = torch.randperm(TOP_K)[:change]
                chosen[seat, at] = fresh[torch.randperm(len(fresh))[:change]]
        self.slots = torch.stack(made).cuda()

    @staticmethod
    def _slots(table: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        ordered = chosen.sort(1).values
        return (table.gather(1, ordered // BLOCK) * BLOCK + ordered % BLOCK).int()


class Steps:
    """A group of a full layer and its shared ones in a graph, with or without compute and fetches."""

    def __init__(self, pool: HotPool, batch: int) -> None:
        self.pool, self.step = pool, HotStep(pool, batch)
        self.selected = torch.full((batch, TOP_K), -1, dtype=torch.int32, device="cuda")
        self.seats = torch.arange(batch, dtype=torch.int32, device="cuda")
        self.own = torch.full((batch,), -1, dtype=torch.int32, device="cuda")
        self.active = torch.full((), batch, dtype=torch.int32, device="cuda")

    def graph(self, compute: Callable[[], None] | None, *, layers: int = LAYERS) -> torch.cuda.CUDAGraph:
        def run() -> None:
            self.step.begin(self.seats, self.own, self.active)
            for layer in range(layers):
                self.step.fetch(layer, self.selected)
                if compute is not None:
                    compute()
            self.step.end()

        return replayed(run)

    def median(self, graph: torch.cuda.CUDAGraph, slots: torch.Tensor) -> float:
        """ms of a replay, the selection changing before each."""
        spans = []
        for number, each in enumerate(slots):
            self.selected.copy_(each)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            graph.replay()
            events[1].record()
            if number >= 3:  # until then the hot buffers fill
                spans.append(events)
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) for a, b in spans)
        return times[len(times) // 2]


def overlap(host: HostRows, new: float, compute: Callable[[], None]) -> dict[str, Any]:
    """What fetching costs a group of layers, alone and beside its compute.

    A full layer waits for its own rows, which no compute of the group can hide: `hidden` is of the shared layers' rows,
    `hidden_of_all` of all.
    """
    pool, single = (
        HotPool(host, [range(layers)], seats=SEATS, top_k=TOP_K, rows=2 * TOP_K, device="cuda")
        for layers in (LAYERS, 1)
    )
    steps = Steps(pool, SEATS)
    alone, beside = steps.graph(None), steps.graph(compute)
    count = 15
    slots = Selections(host, new, 2 * count).slots
    first = Steps(single, SEATS)
    own = first.graph(None, layers=1)
    own_cost = first.median(own, slots[:count]) - first.median(own, slots[count - 1 : count].expand(8, -1, -1))
    idle = steps.median(alone, slots[:1].expand(8, -1, -1))
    bare = steps.median(beside, slots[:1].expand(8, -1, -1))
    before = pool.counters()
    fetched = steps.median(alone, slots[:count])
    after = pool.counters()
    both = steps.median(beside, slots[count:])
    misses = (after["misses"] - before["misses"]) / count / SEATS
    cost, more = fetched - idle, max(0.0, both - bare)
    enough = cost > 0.02
    return {
        "new": new,
        "misses_per_row": round(misses, 1),
        "resolve_us": round(idle * 1e3, 1),
        "fetch_us": round(cost * 1e3, 1),
        "own_us": round(own_cost * 1e3, 1),
        "gb_s": round(misses * SEATS * LAYERS * host.row_bytes / cost / 1e6, 1) if enough else None,
        "compute_us": round(bare * 1e3, 1),
        "with_fetch_us": round(both * 1e3, 1),
        "hidden": round(1 - max(0.0, more - own_cost) / (cost - own_cost), 3) if enough else None,
        "hidden_of_all": round(1 - more / cost, 3) if enough else None,
    }


def reading() -> Callable[[], None]:
    """One layer's compute: products of a decode step's own kernel, which read LAYER_BYTES."""
    x = torch.randn(SEATS, 6144, device="cuda", dtype=torch.bfloat16)
    count = LAYER_BYTES // (6144 * 16_384 * 2)
    weights = torch.randn(count, 16_384, 6144, device="cuda", dtype=torch.bfloat16)
    splits = linear.splits_for(16_384, SEATS)
    out = torch.empty(splits, SEATS, 16_384, device="cuda", dtype=torch.float32 if splits > 1 else torch.bfloat16)

    def run() -> None:
        for weight in weights:
            linear.linear(x, weight, out)

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments.add_argument("--gib", type=int, default=32, help="pinned for the measurement")
    chosen = arguments.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    pinned, pins = pinning(chosen.gib * GIB)
    slab = pinned.slab
    fill(slab)
    rates = link(slab)
    print(rates, flush=True)
    rows: list[dict[str, Any]] = []
    for name, row_bytes in ROWS.items():
        host = host_rows(slab, row_bytes)
        for count in COUNTS:
            rate = gathers(host, count)
            rows.append({"kv": name, "row_bytes": row_bytes, "rows": count, "gb_s": round(rate, 1)})
            print(rows[-1], flush=True)
    compute = reading()
    hidden = []
    for name, row_bytes in ROWS.items():
        for new in NEW:
            hidden.append({"kv": name} | overlap(host_rows(slab, row_bytes), new, compute))
            print(hidden[-1], flush=True)
    pins[1]["unpin_s_gib"] = round(pinned.release() / chosen.gib, 4)
    result = {
        "machine": {"gpu": torch.cuda.get_device_name(), **rates},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__},
        "rows": rows,
        "overlap": hidden,
        "pinning": pins,
        "reach": reach(rows, hidden, pins),
    }
    (chosen.out / "hisparse_gather.json").write_text(json.dumps(result, indent=1) + "\n")
    for entry in result["reach"]:
        print(entry)
    plot(result, chosen.out / "hisparse_gather.png")


def fill(slab: torch.Tensor) -> None:
    """Random bytes, by way of the GPU: on the host it would take minutes."""
    piece = torch.empty(PIECE_BYTES // 8, dtype=torch.int64, device="cuda")
    for first in range(0, slab.nbytes, PIECE_BYTES):
        piece.random_()
        part = slab[first : first + PIECE_BYTES]
        part.copy_(piece.view(torch.uint8)[: len(part)])


def reach(
    rows: list[dict[str, Any]], hidden: list[dict[str, Any]], pins: list[dict[str, Any]]
) -> list[dict[str, Any]]:  # fmt: skip
    found = []
    for count, target in ((16_384, 50), (2048, 40)):
        value = next(row["gb_s"] for row in rows if (row["kv"], row["rows"]) == ("bf16", count))
        found.append(reached(f"gather of {count} rows of 1,152 bytes", value, "GB/s", target, value >= target))
    for row in hidden:
        if row["hidden"] is not None and row["new"] <= 0.2:
            name = f"shared layers' fetches hidden at batch {SEATS}, {row['kv']}, {row['new']:.1%} new"
            found.append(reached(name, row["hidden"], "", 0.9, row["hidden"] >= 0.9))
    for row in pins[:2]:
        found.append(reached(f"pinning, {row['how']}", row["s_gib"], "s/GiB", 0.1, row["s_gib"] <= 0.1))
    return found


def plot(result: dict[str, Any], file: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no matplotlib here: the plot is not drawn")
        return

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    for name in ROWS:
        rows = [row for row in result["rows"] if row["kv"] == name]
        left.plot([r["rows"] for r in rows], [r["gb_s"] for r in rows], "o-", label=f"{name}, {ROWS[name]} bytes a row")
    left.axhline(result["machine"]["host_to_device_gb_s"], color="#999999", label="plain copy")
    left.set_xscale("log", base=2)
    left.set_ylim(0)
    left.set_xlabel("rows fetched")
    left.set_ylabel("GB/s")
    left.legend()
    groups = [row for row in result["overlap"] if row["kv"] == "bf16"]
    at = range(len(groups))
    right.bar([x - 0.2 for x in at], [g["compute_us"] for g in groups], 0.4, label="compute of 4 layers")
    right.bar([x + 0.2 for x in at], [g["with_fetch_us"] for g in groups], 0.4, label="with fetches")
    right.plot(at, [g["fetch_us"] for g in groups], "k_", markersize=30, label="fetches alone")
    right.set_xticks(list(at), [f"{g['new']:.1%} new" for g in groups])
    right.set_ylabel("µs")
    right.legend()
    figure.suptitle(f"HiSparse, batch {SEATS}, top-k 2,048, {result['machine']['gpu']}")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
