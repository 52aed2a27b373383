"""HiSparse on one GPU: rows fetched from pinned host memory, random ones of all of it, and how fast memory is pinned.

    python -m bench.hisparse_gather [--out docs/benchmarks] [--gib 32]

What of that a step's compute hides is measured by `bench.hisparse_step`, in real steps.
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
from glm52_engine.kernels import hisparse
from glm52_engine.kernels.residency import HostRows, Plan, Residency
from glm52_engine.kv.pinning import PIECE_BYTES, Cuda, gpu_place, host_slab, pin

GIB = 1 << 30
BLOCK, LAYERS = 64, 4
ROWS = {"bf16": 1152, "fp8": 656}
COUNTS = (256, 2048, 16_384, 65_536)


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
    pins[1]["unpin_s_gib"] = round(pinned.release() / chosen.gib, 4)
    result = {
        "machine": {"gpu": torch.cuda.get_device_name(), **rates},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__},
        "rows": rows,
        "pinning": pins,
        "reach": reach(rows, pins),
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


def reach(rows: list[dict[str, Any]], pins: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for count, target in ((16_384, 50), (2048, 40)):
        value = next(row["gb_s"] for row in rows if (row["kv"], row["rows"]) == ("bf16", count))
        found.append(reached(f"gather of {count} rows of 1,152 bytes", value, "GB/s", target, value >= target))
    for row in pins[:2]:
        found.append(reached(f"pinning, {row['how']}", row["s_gib"], "s/GiB", 0.1, row["s_gib"] <= 0.1))
    return found


def plot(result: dict[str, Any], file: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no matplotlib here: the plot is not drawn")
        return

    figure, axis = plt.subplots(figsize=(6, 4))
    for name in ROWS:
        rows = [row for row in result["rows"] if row["kv"] == name]
        axis.plot([r["rows"] for r in rows], [r["gb_s"] for r in rows], "o-", label=f"{name}, {ROWS[name]} bytes a row")
    axis.axhline(result["machine"]["host_to_device_gb_s"], color="#999999", label="plain copy")
    axis.set_xscale("log", base=2)
    axis.set_ylim(0)
    axis.set_xlabel("rows fetched")
    axis.set_ylabel("GB/s")
    axis.legend()
    axis.set_title(f"Rows from pinned host memory, {result['machine']['gpu']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
