"""Decode steps that read whole contexts through hot buffers, beside steps with the whole cache on the GPU.

    python -m bench.hisparse_step [--out docs/benchmarks]

GPU, full layer dimensions, 4 layers. First random weights: their selections move far more than a trained model's do, so
the time is a worst case. Logits are compared step by step with the same tokens; a second step with a whole cache of its
own is the control, and says how equal two runs of one thing are.

Then selections that move as is stated (`bench.steered`), one full layer and three shared ones: the same step with all
fetches on the stream of the compute, as it is, and without those of the shared layers, says what of these is hidden.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import shapes, steered
from bench.decode import median_ms
from bench.report import reached
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.kv.hisparse import HotStep
from glm52_engine.kv.pinning import Cuda, gpu_place, host_slab, pin
from glm52_engine.kv.pools import FP8
from glm52_engine.model.device import DecodeStep, DevicePool
from glm52_engine.model.device_weights import DeviceWeights, device_weights
from glm52_engine.model.prefill import Prefill
from glm52_engine.model.sparse_pool import SparsePool

BLOCK, STEPS, CHUNK, HOT_ROWS = 64, 16, 8192, 4096
SHAPES = ((1, 6000), (8, 6000), (32, 6000))


def filled(weights: DeviceWeights, rows: int, context: int, dtype: torch.dtype) -> tuple[DevicePool, Any, Any]:
    """A whole cache with `rows` prompts in it, their block table, and their first tokens."""
    blocks = -(-(context + 128) // BLOCK)
    pool = DevicePool(weights.spec, rows * blocks, BLOCK, dtype, "cuda")
    table = torch.randperm(rows * blocks, device="cuda", dtype=torch.int32).view(rows, blocks)
    prefill = Prefill(weights, pool, most_rows=CHUNK)
    prompts = torch.randint(0, 32000, (rows, context), generator=torch.Generator().manual_seed(1)).cuda()
    at = torch.arange(context, device="cuda")
    firsts = [
        prefill.run(prompts[row], at, table[row : row + 1].expand(context, -1), context, at[-1:], together=4)[0]
        for row in range(rows)
    ]
    return pool, table, torch.stack(firsts).argmax(1)


class Captured:
    """A decode step in a graph, at the end of the prompts."""

    def __init__(self, weights: DeviceWeights, pool: DevicePool | SparsePool, table: Any, first: Any, context: int):
        rows, blocks = table.shape
        bound = weights.spec.vocab_size
        self.step = DecodeStep(weights, pool, batch=rows, longest=blocks * BLOCK, vocab_bound=bound)
        self.step.table.copy_(table)
        # Not the order of the batch: hot buffers belong to seats.
        self.step.seats.copy_(torch.arange(rows).flip(0))
        self.step.active.zero_()
        self.step.run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step.run()
        torch.cuda.synchronize()
        self.step.active.fill_(rows)
        self.step.tokens.copy_(first)
        self.step.positions.fill_(context)
        self.step.lengths.fill_(context + 1)

    def logits(self) -> torch.Tensor:
        self.graph.replay()
        torch.cuda.synchronize()
        return self.step.logits.float()


def apart(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def compare(weights: DeviceWeights, rows: int, context: int, dtype: torch.dtype) -> dict[str, Any]:
    pool, table, first = filled(weights, rows, context, dtype)
    slab = host_slab(pool.blocks * pool.layout.block_bytes)
    pinned = pin(slab, Cuda(0), place=gpu_place(0))
    host = Pool(pool.layout, pool.blocks, slab)
    host.tensor.copy_(pool.tensor.view(torch.uint8).view(pool.blocks, -1))
    same = DevicePool(weights.spec, pool.blocks, BLOCK, dtype, "cuda")
    same.tensor.copy_(pool.tensor)
    sparse = SparsePool(weights.spec, host, seats=rows, rows=HOT_ROWS, device="cuda")
    for row in range(rows):
        sparse.begin(rows - 1 - row, table[row].tolist(), arrived=context)
    whole, control, hot = (Captured(weights, each, table, first, context) for each in (pool, same, sparse))
    worst = {"hot": 0.0, "control": 0.0}
    tokens = 0
    for _ in range(STEPS):
        truth = whole.logits()
        for name, other in (("hot", hot), ("control", control)):
            worst[name] = max(worst[name], apart(other.logits(), truth))
        tokens += int((hot.step.tokens == whole.step.tokens).sum())
        for other in (hot, control):
            other.step.tokens.copy_(whole.step.tokens)
    before = sparse.hot.counters()
    whole_ms, _ = median_ms(whole.graph.replay, STEPS)
    hot_ms, _ = median_ms(hot.graph.replay, STEPS)
    torch.cuda.synchronize()
    after = sparse.hot.counters()
    looked = sum(after[name] - before[name] for name in ("hits", "misses"))
    pinned.release()
    return {
        "rows": rows,
        "context": context,
        "kv": "fp8" if dtype == FP8 else "bf16",
        "whole_ms": round(whole_ms, 3),
        "hot_ms": round(hot_ms, 3),
        "missed": round((after["misses"] - before["misses"]) / max(1, looked), 3),
        "same_tokens": round(tokens / STEPS / rows, 4),
        "worst_apart": round(worst["hot"], 5),
        "control_apart": round(worst["control"], 5),
    }


@contextmanager
def shared_layers(how: str) -> Iterator[None]:
    """Steps captured within fetch for shared layers `beside` the compute, as always, `behind` it, or `not` at all."""
    attended, gather = HotStep.attended, HotStep._gather

    def none(self: HotStep, layer: int) -> None:
        pass

    def own_only(self: HotStep, group: int, layer: int, *, beside: bool) -> None:
        if layer == self._pool.groups[group].start:
            gather(self, group, layer, beside=beside)

    if how != "beside":
        HotStep.attended = none  # type: ignore[method-assign]
    if how == "not":
        HotStep._gather = own_only  # type: ignore[method-assign]
    try:
        yield
    finally:
        HotStep.attended, HotStep._gather = attended, gather  # type: ignore[method-assign]


def hidden(dense: int, rows: int = 32, context: int = 32_768) -> Iterator[dict[str, Any]]:
    """Step times by what is done for shared layers, at each overlap of consecutive selections.

    `dense`: layers without experts, from the first one on. In front of shared layers the model has one full layer that
    is dense, which computes for less than half as long as one with experts, and 18 of the other kind.
    """
    spec = steered.spec({"first_k_dense_replace": dense})
    tensors = shapes.random_tensors(spec, "cuda")
    steered.steer(spec, tensors)
    weights = device_weights(spec, tensors, "cuda")
    blocks = -(-(context + 1024) // BLOCK)
    layout = KvLayout.of(spec, BLOCK, "bf16")
    slab = host_slab(rows * blocks * layout.block_bytes)
    pinned = pin(slab, Cuda(0), place=gpu_place(0))
    host = Pool(layout, rows * blocks, slab)
    steered.fill(host, "cuda")
    table = torch.randperm(rows * blocks, device="cuda", dtype=torch.int32).view(rows, blocks)
    first = torch.zeros(rows, dtype=torch.int64, device="cuda")
    sparse = SparsePool(spec, host, seats=rows, rows=HOT_ROWS, device="cuda")
    steps = {}
    for how in ("beside", "behind", "not"):
        with shared_layers(how):
            steps[how] = Captured(weights, sparse, table, first, context)
    for overlap in (0.95, 0.8, 0.5):
        times = {}
        for how, each in steps.items():
            for row in range(rows):
                sparse.begin(rows - 1 - row, table[row].tolist(), arrived=context)
            each.step.positions.fill_(context)
            each.step.lengths.fill_(context + 1)
            each.step._frequencies[0] = steered.speed(spec, context, overlap)
            median_ms(each.graph.replay, 8)  # the first ones find nothing
            before = sparse.hot.counters()
            times[how], _ = median_ms(each.graph.replay, 4 * STEPS)
            torch.cuda.synchronize()
            after = sparse.hot.counters()
        missed = (after["misses"] - before["misses"]) / (4 * STEPS + 5) / rows
        cost = times["behind"] - times["not"]
        yield {
            "rows": rows,
            "context": context,
            "dense": dense,
            "overlap": overlap,
            "missed_per_row": round(missed, 1),
            **{f"{how}_ms": round(time, 3) for how, time in times.items()},
            "hidden": round((times["behind"] - times["beside"]) / cost, 3),
        }
    del steps, sparse, weights
    torch.cuda.empty_cache()
    pinned.release()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    chosen = arguments.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    weights = shapes.random_weights(shapes.spec(), "cuda")
    rows = []
    for dtype in (torch.bfloat16, FP8):
        for batch, context in SHAPES:
            rows.append(compare(weights, batch, context, dtype))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
    del weights
    overlaps = []
    for dense in (0, 1):
        for row in hidden(dense):
            overlaps.append(row)
            print(row, flush=True)
    result = {
        "machine": {"gpu": torch.cuda.get_device_name()},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__},
        "rows": rows,
        "overlaps": overlaps,
        "reach": [
            reached(
                f"logits of {row['rows']} rows, {row['kv']}, as equal as two whole caches",
                row["worst_apart"],
                "",
                row["control_apart"],
                row["worst_apart"] <= row["control_apart"],
            )
            for row in rows
        ]
        + [
            reached(
                f"shared layers' fetches hidden, {row['rows']} rows, overlap {row['overlap']}, {row['dense']} dense",
                row["hidden"],
                "",
                0.9,
                row["hidden"] >= 0.9,
            )
            for row in overlaps
        ],
    }
    (chosen.out / "hisparse_step.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
