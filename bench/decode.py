"""Decode steps and prefill at GLM-5.2's layer dimensions on one GPU: our engine, transformers, and what memory allows.

    python -m bench.decode [--out docs/benchmarks] [--fp8] [--kv fp8]

Rows of a batch are either independent (their own prompts: 32 experts are all in use from 8 rows on) or identical (one
prompt for all: every row goes to the same 8 experts, and a step reads a quarter of the weights). Published figures do
not always say which they are; here both are shown.

--fp8: the same model as a checkpoint in FP8 holds it; --kv fp8: its KV in FP8 too. The figures of vLLM and transformers
are bfloat16's, so that these stand alone, beside their own limit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import shapes
from bench.report import reached
from glm52_engine.kernels import chain, mla
from glm52_engine.model.device import DecodeStep, DevicePool
from glm52_engine.model.device_weights import DeviceWeights
from glm52_engine.model.prefill import Prefill

SHAPES = ((1, 4096), (8, 4096), (64, 4096), (8, 16384), (8, 65536))
VLLM = {(1, 4096): 1.66, (8, 4096): 1.74, (64, 4096): 2.77, (8, 16384): 2.05, (8, 65536): 2.56}
"""ms a step of vLLM 0.24.0 with these dimensions on one H200: measured apart, its rows' routing is not known."""
VLLM_PREFILL = {(8, 4096): 100_000, (64, 4096): 78_500, (8, 16384): 94_100, (8, 65536): 74_600}
BLOCK, CHUNK, STEPS = 64, 8192, 40


def median_ms(run: Callable[[], object], count: int) -> tuple[float, float]:
    """Median and 99th percentile of `count` runs in milliseconds, by device events."""
    for _ in range(5):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[count // 2], times[min(count - 1, int(count * 0.99))]


def bandwidth() -> dict[str, float]:
    """TB/s of a copy (read + write) and of a read, 2 GiB each, by PyTorch's elementwise and reduction kernels."""
    x = torch.ones(1 << 29, device="cuda")
    y = torch.empty_like(x)
    copy, _ = median_ms(lambda: torch.add(x, 1, out=y), 20)
    read, _ = median_ms(lambda: x.sum(), 20)
    return {"copy_tb_s": 2 * x.nbytes / copy / 1e9, "read_tb_s": x.nbytes / read / 1e9}


class Ours:
    """A batch whose context was really prefilled."""

    def __init__(self, weights: DeviceWeights, rows: int, context: int, *, identical: bool, kv: str = "bf16") -> None:
        spec = weights.spec
        room = context + 128
        blocks = -(-room // BLOCK)
        dtype = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kv]
        self.pool = DevicePool(spec, rows * blocks, BLOCK, dtype, "cuda")
        self.step = DecodeStep(weights, self.pool, batch=rows, longest=blocks * BLOCK, vocab_bound=spec.vocab_size)
        self.step.table.copy_(torch.randperm(rows * blocks, device="cuda", dtype=torch.int32).view(rows, blocks))
        draw = torch.Generator().manual_seed(1)
        prompts = torch.randint(0, 32000, (1 if identical else rows, context), generator=draw).cuda()
        self.prompts = prompts.expand(rows, -1)
        self.prefill = Prefill(weights, self.pool, most_rows=CHUNK)
        self.rows, self.context = rows, context
        self.logits = torch.empty(rows, spec.vocab_size, device="cuda")

    def fill(self) -> float:
        """Prefill every row in chunks; seconds."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        together = max(1, min(self.rows, CHUNK // self.context))
        for first in range(0, self.rows, together):
            rows = slice(first, min(self.rows, first + together))
            count = rows.stop - rows.start
            length = min(self.context, CHUNK // count)
            for start in range(0, self.context, length):
                tokens = self.prompts[rows, start : start + length]
                size = tokens.shape[1]
                positions = torch.arange(start, start + size, device="cuda").repeat(count)
                table = (
                    self.step.table[rows].repeat_interleave(size, 0)
                    if count > 1
                    else self.step.table[rows].expand(size, -1)
                )
                last = torch.arange(size - 1, count * size, size, device="cuda")
                self.logits[rows] = self.prefill.run(tokens.flatten(), positions, table, start + size, last, together=4)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def reset(self) -> None:
        self.step.tokens.copy_(self.logits.argmax(1))
        self.step.positions.fill_(self.context)
        self.step.lengths.fill_(self.context + 1)

    def graph(self) -> torch.cuda.CUDAGraph:
        self.reset()
        self.step.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step.run()
        self.reset()
        return graph


def measure(
    weights: DeviceWeights, rows: int, context: int, identical: bool, rates: dict[str, float], *, fp8: bool, kv: str
) -> dict[str, Any]:
    """One row of the table."""
    ours = Ours(weights, rows, context, identical=identical, kv=kv)
    if not identical:
        ours.fill()  # compiles what its identical twin needs too
    seconds = ours.fill()
    graph = ours.graph()
    busy: list[float] = []
    ms, p99 = median_ms(graph.replay, STEPS)
    for _ in range(8):
        graph.replay()
        busy.append(float(ours.step.experts_with_rows() - 1))
    experts = sum(busy) / len(busy)
    read = shapes.step_bytes(weights, ours.pool.layout, rows=rows, context=context, experts=experts)
    floor = read / rates["read_tb_s"] / 1e9
    return {
        "rows": rows,
        "context": context,
        "requests": "identical" if identical else "independent",
        "step_ms": round(ms, 3),
        "p99_ms": round(p99, 3),
        "experts": round(experts, 1),
        "limit_ms": round(floor, 3),
        "over_limit": round(ms / floor, 3),
        "vllm_ms": None if fp8 else VLLM[rows, context],
        "prefill_tokens_s": round(rows * context / seconds),
        "vllm_prefill_tokens_s": None if fp8 else VLLM_PREFILL.get((rows, context)),
        "shares": shares(ours),
    }


def shares(ours: Ours) -> dict[str, float]:
    """Microseconds of each kernel in a step, without programmatic launch: there a kernel's time holds its waiting."""
    kept = dict(chain.CHAINED)
    chain.CHAINED.clear()
    chain.CHAINED["PDL"] = False
    try:
        graph = ours.graph()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                graph.replay()
            torch.cuda.synchronize()
    finally:
        chain.CHAINED.clear()
        chain.CHAINED.update(kept)
    total: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = (
                "flash_mla" if "sparse_attn_fwd" in event.name else event.name.split("<")[0].split("(")[0].strip("_ ")
            )
            total[name] = total.get(name, 0.0) + event.device_time / 4
    return {name: round(us, 1) for name, us in sorted(total.items(), key=lambda item: -item[1])}


def theirs(weights: DeviceWeights) -> list[dict[str, Any]]:
    """Decode steps of transformers with the same weights."""
    model = shapes.transformers_model(weights)
    rows = []
    for batch, context in ((1, 4096), (8, 4096)):
        try:
            rows.append({"rows": batch, "context": context, "step_ms": round(_their_step(model, batch, context), 1)})
        except torch.OutOfMemoryError:
            rows.append({"rows": batch, "context": context, "error": "out of memory"})
        torch.cuda.empty_cache()
    return rows


@torch.inference_mode()
def _their_step(model: Any, batch: int, context: int) -> float:
    ids = torch.randint(0, 32000, (batch, context), device="cuda")
    out = model(ids, use_cache=True, logits_to_keep=1)
    state = {"cache": out.past_key_values, "next": out.logits[:, -1].argmax(-1, keepdim=True)}

    def step() -> None:
        out = model(state["next"], past_key_values=state["cache"], use_cache=True)
        state["cache"], state["next"] = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

    return median_ms(step, 10)[0]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments.add_argument("--without-transformers", action="store_true")
    arguments.add_argument("--fp8", action="store_true", help="weights in FP8; writes decode-fp8.json")
    arguments.add_argument("--kv", choices=("bf16", "fp8"), default="bf16")
    chosen = arguments.parse_args()
    plain = not chosen.fp8 and chosen.kv == "bf16"
    name = "decode" if plain else "decode-fp8"
    chosen.out.mkdir(parents=True, exist_ok=True)
    rates = bandwidth()
    weights = shapes.random_weights(shapes.spec(), "cuda", fp8=chosen.fp8)
    rows = []
    print(f"{rates['copy_tb_s']:.2f} TB/s copy, {rates['read_tb_s']:.2f} TB/s read")
    for batch, context in SHAPES:
        for identical in (False, True) if batch > 1 else (False,):
            row = measure(weights, batch, context, identical, rates, fp8=not plain, kv=chosen.kv)
            rows.append(row)
            print(*(f"{key} {value}" for key, value in row.items() if key != "shares"), sep="  ", flush=True)
            torch.cuda.empty_cache()
    result = {
        "machine": {
            "gpu": torch.cuda.get_device_name(),
            "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30),
            **rates,
        },
        "date": time.strftime("%Y-%m-%d"),
        "weights": "fp8" if chosen.fp8 else "bf16",
        "kv": chosen.kv,
        "versions": {"torch": torch.__version__, "flash_mla": mla.flash_mla_sparse_fwd is not None},
        "rows": rows,
        "reach": reach(rows),
    }
    (chosen.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if plain and not chosen.without_transformers:
        result["transformers"] = theirs(weights)
        print(result["transformers"], flush=True)
        (chosen.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, chosen.out / f"{name}.png")


def reach(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the figures should be, and whether they are."""
    found = []
    for row in rows:
        name = f"{row['rows']} x {row['context']} {row['requests']}"
        if row["vllm_ms"]:
            found.append(
                reached(f"step, {name}", row["step_ms"], "ms", row["vllm_ms"], row["step_ms"] < row["vllm_ms"])
            )
        found.append(reached(f"over the limit, {name}", row["over_limit"], "x", 1.3, row["over_limit"] <= 1.3))
        wanted = row["vllm_prefill_tokens_s"]
        if wanted:
            value = row["prefill_tokens_s"]
            found.append(reached(f"prefill, {name}", value, "tokens/s", wanted, value >= wanted))
    return found


def plot(result: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    rows = result["rows"]
    names = [f"{row['rows']} × {row['context']:,}\n{row['requests']}" for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 5), width_ratios=(2, 1.3))
    at = range(len(rows))
    left.bar([x - 0.27 for x in at], [row["limit_ms"] for row in rows], 0.27, label="memory's limit", color="#bbbbbb")
    left.bar(at, [row["step_ms"] for row in rows], 0.27, label="glm52", color="#1f77b4")
    vllm = [(x + 0.27, row["vllm_ms"]) for x, row in zip(at, rows, strict=True) if row["vllm_ms"]]
    if vllm:
        left.bar(*zip(*vllm, strict=True), 0.27, label="vLLM 0.24.0 (routing unknown)", color="#ff7f0e")
    left.set_xticks(list(at), names, fontsize=7)
    left.set_ylabel("ms a decode step")
    left.legend()
    kinds: dict[str, list[float]] = {}
    for index, row in enumerate(rows):
        for name, us in row["shares"].items():
            kinds.setdefault(name, [0.0] * len(rows))[index] = us
    base = [0.0] * len(rows)
    for name, values in sorted(kinds.items(), key=lambda item: -sum(item[1]))[:12]:
        right.bar(at, values, 0.7, bottom=base, label=name)
        base = [a + b for a, b in zip(base, values, strict=True)]
    right.set_xticks(list(at), [name.split("\n")[0] for name in names], fontsize=6, rotation=30)
    right.set_ylabel("µs of each kernel in a step")
    right.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    stored = f"weights {result['weights']}, KV {result['kv']}"
    figure.suptitle(f"GLM-5.2 layer dimensions, 4 layers, 32 experts, {stored}, {result['machine']['gpu']}")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
