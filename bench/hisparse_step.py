"""Decode steps that read whole contexts through hot buffers, beside steps with the whole cache on the GPU.

    python -m bench.hisparse_step [--out docs/benchmarks]

GPU, full layer dimensions, 4 layers, random weights: their selections move far more than a trained model's do, so the
time is a worst case. Logits are compared step by step with the same tokens; a second step with a whole cache of its own
is the control, and says how equal two runs of one thing are.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from bench import shapes
from bench.decode import median_ms
from bench.report import reached
from glm52_engine.kv import Pool
from glm52_engine.kv.pinning import Cuda, gpu_place, host_slab, pin
from glm52_engine.kv.pools import FP8
from glm52_engine.model.device import DecodeStep, DevicePool, DeviceWeights
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
    result = {
        "machine": {"gpu": torch.cuda.get_device_name()},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__},
        "rows": rows,
        "reach": [
            reached(
                f"logits of {row['rows']} rows, {row['kv']}, as equal as two whole caches",
                row["worst_apart"],
                "",
                row["control_apart"],
                row["worst_apart"] <= row["control_apart"],
            )
            for row in rows
        ],
    }
    (chosen.out / "hisparse_step.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
