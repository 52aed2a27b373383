"""What the host costs between two decode steps, with launch-ahead and without: real ranks, real graphs, one GPU.

    python -m bench.launch_ahead [--out docs/benchmarks]

A stamp of the GPU's own clock is the first and the last node of every captured step. Idle is the time from the last
stamp of a step to the first of the next one: whatever the host does between them that is not hidden. The engine is the
whole one (rank thread, event loop, one consumer for each request), the weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from bench import shapes
from bench.report import reached
from glm52_engine.checkpoint.config import ModelSpec, parse_model_spec
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.model.device import DecodeStep
from glm52_engine.runtime.device import executor as device_executor
from glm52_engine.runtime.device.executor import DeviceExecutor
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.rank import StepLimits
from glm52_engine.runtime.types import Blocks, Request, Sampling, Token
from glm52_engine.schedule import Limits, blocks_for

BATCHES = (1, 8, 32)
CONTEXT, TOKENS, BLOCK = 512, 400, 64
WARM = 40
"""Steps at the start that are not counted."""
STAMPS = 4096


def narrow() -> ModelSpec:
    """All 78 layers of GLM-5.2, in a width that leaves a step to its launches: 21 with an indexer, 3 dense."""
    types = ["full"] * 3 + [("full" if layer % 4 == 2 else "shared") for layer in range(3, 78)]
    config = shapes.config() | {
        "num_hidden_layers": 78, "indexer_types": types, "first_k_dense_replace": 3, "hidden_size": 1024,
        "intermediate_size": 2048, "moe_intermediate_size": 256, "n_routed_experts": 16, "q_lora_rank": 512,
        "qk_nope_head_dim": 64, "qk_head_dim": 128, "v_head_dim": 64, "head_dim": 64,
    }  # fmt: skip
    return parse_model_spec(config, Path("bench/launch_ahead.py"))


MODELS = {"4 layers of full width": shapes.spec, "78 layers of reduced width": narrow}


@triton.jit
def _stamp(times, count, size, END: tl.constexpr):
    at = tl.load(count)
    tl.store(times + 2 * (at % size) + END, tl.extra.cuda.globaltimer())
    if END:
        tl.store(count, at + 1)


class Stamped(DecodeStep):
    """A decode step between two stamps; all of them write to one table."""

    times = torch.zeros(0)
    count = torch.zeros(0)

    def run(self, *, whole: bool = False) -> None:
        _stamp[(1,)](self.times, self.count, STAMPS, END=0)
        super().run(whole=whole)
        _stamp[(1,)](self.times, self.count, STAMPS, END=1)


def engine_of(weights: Any, seats: int, *, launch_ahead: bool) -> LocalEngine:
    length = CONTEXT + TOKENS + 1
    layout = KvLayout.of(weights.spec, BLOCK)
    blocks = 2 * seats * blocks_for(length, BLOCK)
    pool = Pool(layout, blocks, torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8).pin_memory())
    executor = DeviceExecutor(
        weights, pool, seats=seats, blocks_per_seat=blocks_for(length, BLOCK), vocab_bound=32000, step_tokens=4096
    )
    engine = LocalEngine(
        [executor],
        limits=Limits(length, BLOCK, seats, blocks, weights.spec.vocab_size),
        step=StepLimits(4096, 1024, 32000, frozenset()),
        layout={},
        prefix_cache=False,
        launch_ahead=launch_ahead,
    )
    engine.warm_up()
    engine.start()
    return engine


async def hand_over(engine: LocalEngine, name: str, prompt: tuple[int, ...]) -> tuple[Request, Blocks, Token]:
    """A prompt's KV computed and moved to the blocks of its decode, as it crosses from pod to pod."""
    sampling = Sampling(TOKENS, temperature=0.0, ignore_eos=True)
    prefilled = await engine.prefill(Request(f"{name}-p", prompt, sampling))
    request = Request(name, prompt, sampling)
    blocks = await engine.reserve(request)
    slab: torch.Tensor = engine.pools[0].tensor  # type: ignore[assignment]
    slab[list(blocks.ids[: len(prefilled.blocks.ids)])] = slab[list(prefilled.blocks.ids)]
    engine.release(f"{name}-p")
    return request, blocks, prefilled.token


async def decode(engine: LocalEngine, batch: int) -> tuple[list[list[int]], float]:
    """Tokens of every request, and tokens a second while all of them ran."""
    draw = torch.Generator().manual_seed(7)
    prompts = [tuple(torch.randint(0, 32000, (CONTEXT,), generator=draw).tolist()) for _ in range(batch)]
    ready = [await hand_over(engine, f"r{n}", prompt) for n, prompt in enumerate(prompts)]
    # All rows in the same step: rows that join earlier would run in smaller buckets, whose rounding is their own.
    with engine._ranks[0]._wake:
        streams = [(first, engine.decode(request, blocks, first)) for request, blocks, first in ready]
    times: list[float] = []

    async def consume(first: Token, tokens: AsyncIterator[Token]) -> list[int]:
        found = [first.id]
        async for token in tokens:
            found.append(token.id)
            times.append(time.perf_counter())
        return found

    found = await asyncio.gather(*(consume(*stream) for stream in streams))
    part = times[WARM * batch :]
    return list(found), (len(part) - 1) / (part[-1] - part[0])


def measure(weights: Any, batch: int, *, launch_ahead: bool) -> tuple[dict[str, Any], list[list[int]]]:
    engine = engine_of(weights, batch, launch_ahead=launch_ahead)
    try:
        first, _ = asyncio.run(decode(engine, batch))
        Stamped.count.zero_()
        found, rate = asyncio.run(decode(engine, batch))
        torch.cuda.synchronize()
        steps = min(int(Stamped.count), STAMPS)
        stamps = Stamped.times[: 2 * steps].view(-1, 2).cpu().double()[WARM:] / 1000
        idle = (stamps[1:, 0] - stamps[:-1, 1]).sort().values
        step = (stamps[1:, 1] - stamps[:-1, 1]).sort().values
        return {
            "batch": batch,
            "launch_ahead": launch_ahead,
            "idle_us": {"median": _at(idle, 0.5), "p99": _at(idle, 0.99), "max": _at(idle, 1)},
            "step_us": {"median": _at(step, 0.5), "p99": _at(step, 0.99)},
            "tokens_s": round(rate),
            "steps_ahead": sum(rank.counters.steps_ahead for rank in engine._ranks),
            "deterministic": found == first,
        }, found
    finally:
        engine.stop()


def _at(ordered: torch.Tensor, share: float) -> float:
    return round(float(ordered[min(len(ordered) - 1, int(len(ordered) * share))]), 1)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    chosen = arguments.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    device_executor.DecodeStep = Stamped  # type: ignore[misc]
    Stamped.times = torch.zeros(2 * STAMPS, dtype=torch.int64, device="cuda")
    Stamped.count = torch.zeros((), dtype=torch.int64, device="cuda")
    rows: list[dict[str, Any]] = []
    for name, spec in MODELS.items():
        weights = shapes.random_weights(spec(), "cuda")
        for batch in BATCHES:
            pair = [measure(weights, batch, launch_ahead=on) for on in (False, True)]
            same = pair[0][1] == pair[1][1]
            for row, _ in pair:
                rows.append({"model": name, **row, "same_tokens": same})
                print(json.dumps(rows[-1]), flush=True)
        del weights
        torch.cuda.empty_cache()
    result = {
        "machine": {"gpu": torch.cuda.get_device_name(), "python": sys.version.split()[0]},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "rows": rows,
        "reach": reach(rows),
    }
    (chosen.out / "launch_ahead.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, chosen.out / "launch_ahead.png")


def reach(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the figures should be, and whether they are."""
    found = []
    for off, on in zip(rows[::2], rows[1::2], strict=True):
        name = f"{on['model']}, batch {on['batch']}"
        for what, target in (("median", 10.0), ("p99", 25.0)):
            value = on["idle_us"][what]
            found.append(reached(f"idle, {what}, {name}", value, "us", target, value <= target))
        found.append(
            reached(f"speed, {name}", on["tokens_s"], "tokens/s", off["tokens_s"], on["tokens_s"] >= off["tokens_s"])
        )
        sound = on["same_tokens"] and on["deterministic"] and off["deterministic"]
        found.append(reached(f"the same tokens, {name}", sound, "", True, sound))
    return found


def plot(result: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    pairs = list(zip(result["rows"][::2], result["rows"][1::2], strict=True))
    names = [f"{on['model'].split(' of')[0]}\nbatch {on['batch']}" for _, on in pairs]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.5))
    at = range(len(pairs))
    for place, label in ((0, "without"), (1, "with launch-ahead")):
        shift = 0.4 * place - 0.2
        left.bar([x + shift for x in at], [pair[place]["idle_us"]["median"] for pair in pairs], 0.38, label=label)
        right.bar([x + shift for x in at], [pair[place]["tokens_s"] for pair in pairs], 0.38, label=label)
    for axes, text in ((left, "µs idle between steps, median"), (right, "tokens/s")):
        axes.set_xticks(list(at), names, fontsize=7)
        axes.set_ylabel(text)
        axes.set_yscale("log")
        axes.legend()
    figure.suptitle(f"Decode with and without launch-ahead, {result['machine']['gpu']}")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
