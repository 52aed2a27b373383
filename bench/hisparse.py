"""Decode past the wall of GPU memory: KV on the GPU, the same capped, and HiSparse in the capped one's memory.

    python -m bench.hisparse [--out docs/benchmarks]      one H200, 64 GiB of host memory, about 3 minutes
    python -m bench.hisparse --size short --out DIR       the same GPU, half a minute: whether it runs at all
    python -m bench.hisparse --size tiny --out DIR        the plain model on a CPU, seconds: the same

GPU: GLM-5.2's layer dimensions, 4 layers of which the first has an indexer (21 of the real 78 have), 32 experts,
bfloat16. Whole engines (rank thread, event loop, a consumer for each request, launch-ahead) on one host pool; prompts'
KV is there already, as after a hand-off, and index keys and queries are built so that consecutive selections overlap as
stated (`bench.steered`). Each of `concurrency` clients sends its requests one after the other. The capped cache gets
the bytes that index keys and hot buffers take, and no system ever preempts: what does not fit waits, and its wait is
part of its time to first token. A hit rate counts a request's first step too, which finds nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import shapes, steered
from bench.report import reached
from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.model import Model
from glm52_engine.model.cache import HotCache
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.executor import Executor, HostExecutor
from glm52_engine.runtime.rank import StepLimits
from glm52_engine.runtime.types import Request, Sampling, Token
from glm52_engine.schedule import Limits, blocks_for

GIB = 1 << 30
OVERLAP = 0.95
SYSTEMS = ("uncapped", "capped", "hisparse")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """`cases`: contexts (prompt and output) and their concurrencies; `overlaps`: of further runs of the last case."""

    block: int
    seats: int
    hot_rows: int
    pool_tokens: int
    output: int
    rounds: int
    cases: tuple[tuple[int, tuple[int, ...]], ...]
    overlaps: tuple[float, ...]

    @property
    def longest(self) -> int:
        return max(context for context, _ in self.cases)


SIZES = {
    "full": Size(
        block=64, seats=128, hot_rows=4096, pool_tokens=64 * 131_072, output=256, rounds=2,
        cases=((8192, (1, 4, 32, 128)), (32_768, (1, 4, 32, 128)), (131_072, (1, 4, 16, 64))), overlaps=(0.5, 0.8),
    ),
    "short": Size(
        block=64, seats=32, hot_rows=4096, pool_tokens=32 * 16_384, output=64, rounds=1,
        cases=((16_384, (1, 32)),), overlaps=(),
    ),
    "tiny": Size(
        block=16, seats=6, hot_rows=64, pool_tokens=6 * 512, output=24, rounds=2,
        cases=((256, (1, 2)), (512, (1, 6))), overlaps=(0.5,),
    ),
}  # fmt: skip


def tiny() -> ModelSpec:
    """The same in sizes for a test."""
    return steered.spec({
        "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32, "v_head_dim": 16,
        "head_dim": 16, "index_n_heads": 8, "index_head_dim": 32, "index_topk": 32, "vocab_size": 512,
        "eos_token_id": [500], "pad_token_id": 500, "dtype": "bfloat16",
    })  # fmt: skip


@dataclass
class System:
    """One of the three. `frequencies`: those tensors of its steps that turn with the position."""

    name: str
    engine: LocalEngine
    executor: Executor
    device_kv: int
    frequencies: list[torch.Tensor]

    def turn(self, speed: float) -> None:
        for each in self.frequencies:
            each[0] = speed


@dataclass
class Seen:
    """What clients and the watch over the engine noted in one run; seconds."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    completed: int = 0
    running: list[int] = field(default_factory=list)
    used: list[float] = field(default_factory=list)


def slab(pool_bytes: int, device: str, show: Callable[[str], None]) -> tuple[torch.Tensor, Callable[[], object]]:
    """The host pool's memory and what lets go of it."""
    from glm52_engine.kv.pinning import Cuda, gpu_place, host_slab, pin

    memory = host_slab(pool_bytes)
    if device == "cpu":
        return memory, lambda: None
    pinned = pin(memory, Cuda(0), place=gpu_place(0))
    show(f"pinned {pool_bytes / GIB:.1f} GiB in {pinned.seconds:.1f} s")
    return memory, pinned.release


def systems(size: Size, device: str, memory: torch.Tensor, layout: KvLayout, spec: ModelSpec, weights: Any) -> Any:
    """Makers of the three by name, so that only one is on the device at a time."""
    from glm52_engine.model.sparse_pool import device_bytes

    blocks = size.pool_tokens // size.block
    hot = device_bytes(layout, blocks=blocks, seats=size.seats, rows=size.hot_rows)
    capped = min(blocks, max(blocks_for(size.longest, size.block), hot // layout.block_bytes))
    if device == "cpu":
        capped = blocks // 3  # so small a model's hot buffers are larger than its whole pool

    def make(name: str) -> System:
        count = capped if name == "capped" else blocks
        pool = Pool(layout, count, memory[: count * layout.block_bytes])
        hot_rows = size.hot_rows if name == "hisparse" else None
        if device == "cpu":
            executor, frequencies = _on_cpu(size, pool, spec, weights, hot_rows)
        else:
            executor, frequencies = _on_gpu(size, pool, spec, weights, hot_rows)
        engine = LocalEngine(
            [executor],
            limits=Limits(size.longest, size.block, size.seats, count, spec.vocab_size, max_waiting=4096),
            step=StepLimits(4096, 1024, spec.vocab_size - 16, frozenset()),
            layout={},
            prefix_cache=False,
            launch_ahead=device != "cpu",
        )
        engine.warm_up()
        engine.start()
        kept = hot if hot_rows is not None else count * layout.block_bytes
        return System(name, engine, executor, kept, frequencies)

    return make


def _on_gpu(
    size: Size, pool: Pool, spec: ModelSpec, weights: Any, hot_rows: int | None
) -> tuple[Executor, list[torch.Tensor]]:
    from glm52_engine.runtime.device.executor import DeviceExecutor

    executor = DeviceExecutor(
        weights, pool, seats=size.seats, blocks_per_seat=blocks_for(size.longest, size.block),
        vocab_bound=spec.vocab_size - 16, step_tokens=4096, hot_rows=hot_rows,
    )  # fmt: skip
    return executor, [bucket.step._frequencies for bucket in executor._buckets.values()]


def _on_cpu(
    size: Size, pool: Pool, spec: ModelSpec, weights: Any, hot_rows: int | None
) -> tuple[Executor, list[torch.Tensor]]:
    longest = blocks_for(size.longest, size.block)
    hot = None
    if hot_rows is not None:
        hot = HotCache(
            pool.layout, pool, spec.indexer_types, top_k=spec.index_topk, seats=size.seats, rows=hot_rows,
            longest=longest,
        )  # fmt: skip
    model = Model(spec, weights.tensors)
    executor = HostExecutor(
        model, pool, seats=size.seats, blocks_per_seat=longest, vocab_bound=spec.vocab_size - 16, hot=hot
    )
    return executor, [model._frequencies]


async def client(engine: LocalEngine, name: str, prompt: tuple[int, ...], size: Size, seen: Seen) -> None:
    """Requests one after the other."""
    sampling = Sampling(size.output, temperature=0.0, ignore_eos=True)
    for number in range(size.rounds):
        request = Request(f"{name}-{number}", prompt, sampling)
        last = time.perf_counter()
        blocks = await engine.reserve(request)
        came = False
        async for _ in engine.decode(request, blocks, Token(1, 0)):
            now = time.perf_counter()
            (seen.gaps if came else seen.first).append(now - last)
            last, came = now, True
            seen.tokens += 1
        seen.completed += 1


async def watch(engine: LocalEngine, seen: Seen) -> None:
    while True:
        stats = engine.stats()
        seen.running.append(stats.running)
        seen.used.append(1 - stats.blocks_free / stats.blocks_total)
        await asyncio.sleep(0.02)


async def traffic(engine: LocalEngine, context: int, concurrency: int, size: Size) -> tuple[Seen, float]:
    seen = Seen()
    prompt = (1,) * (context - size.output)
    watching = asyncio.create_task(watch(engine, seen))
    began = time.perf_counter()
    await asyncio.gather(*(client(engine, f"c{n}", prompt, size, seen) for n in range(concurrency)))
    seconds = time.perf_counter() - began
    watching.cancel()
    return seen, seconds


def measure(system: System, spec: ModelSpec, context: int, concurrency: int, overlap: float, size: Size) -> Row:
    system.turn(steered.speed(spec, context, overlap))
    first = system.engine.stats()
    before = first.hot
    seen, seconds = asyncio.run(traffic(system.engine, context, concurrency, size))
    stats = system.engine.stats()
    row: Row = {
        "system": system.name,
        "context": context,
        "concurrency": concurrency,
        "overlap": overlap,
        "tokens_s": round(seen.tokens / seconds, 1),
        "completed": seen.completed,
        "step_ms": round(seconds / max(1, stats.steps - first.steps) * 1e3, 3),
        "preemptions": 0,  # there is no such thing; who would be preempted elsewhere waits here
        "ttft_s": {"p50": _at(seen.first, 0.5), "p99": _at(seen.first, 0.99)},
        "itl_ms": {"p50": _at(seen.gaps, 0.5, 1e3), "p99": _at(seen.gaps, 0.99, 1e3)},
        "kv_peak": round(max(seen.used), 3),
        "kv_device_gib": round(system.device_kv / GIB, 3),
        "seats": round(sum(seen.running) / len(seen.running) / size.seats, 3),
    }
    if stats.hot is not None and before is not None:
        hits, misses = stats.hot.hits - before.hits, stats.hot.misses - before.misses
        row |= {
            "hit_rate": round(hits / (hits + misses), 4) if hits + misses else None,
            "gathered_gib": round((stats.hot.fetched_bytes - before.fetched_bytes) / GIB, 3),
            "whole": not hits + misses,
        }
    return row


def _at(values: Sequence[float], share: float, times: float = 1.0) -> float:
    return round(sorted(values)[min(len(values) - 1, int(len(values) * share))] * times, 4)


def runs(size: Size) -> list[tuple[int, int, float]]:
    """Context, concurrency and overlap of each."""
    usual = [(context, count, OVERLAP) for context, counts in size.cases for count in counts]
    context, counts = size.cases[-1]
    return usual + [(context, counts[-1], overlap) for overlap in size.overlaps]


def run(size: Size, spec: ModelSpec, device: str, show: Callable[[str], None]) -> Iterator[Row]:
    """Every row of the result, as soon as it is there."""
    layout = KvLayout.of(spec, size.block, "bf16")
    blocks = size.pool_tokens // size.block
    memory, let_go = slab(blocks * layout.block_bytes, device, show)
    steered.fill(Pool(layout, blocks, memory), device)
    weights: Any = shapes.random_tensors(spec, device)
    steered.steer(spec, weights)
    if device != "cpu":
        from glm52_engine.model.device_weights import device_weights

        weights = device_weights(spec, weights, device)
    make = systems(size, device, memory, layout, spec, weights)
    for name in SYSTEMS:
        began = time.perf_counter()
        system = make(name)
        show(f"{name}: ready in {time.perf_counter() - began:.1f} s")
        try:
            for context, concurrency, overlap in runs(size):
                yield measure(system, spec, context, concurrency, overlap, size)
        finally:
            system.engine.stop()
        del system
        if device != "cpu":
            torch.cuda.empty_cache()
    let_go()


def reach(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the figures should be, and whether they are."""
    found = []
    for case in dict.fromkeys(_case(row) for row in rows):
        by = {row["system"]: row for row in rows if _case(row) == case}
        if len(by) < len(SYSTEMS):
            continue
        context, concurrency, overlap = case
        name = f"{context:,} × {concurrency}"
        rates = {system: row["tokens_s"] for system, row in by.items()}
        against = round(rates["hisparse"] / rates["uncapped"], 3)
        if concurrency <= 4:
            found.append(reached(f"small batch, {name}", against, "× uncapped", 0.98, against >= 0.98))
            continue
        if overlap != OVERLAP or by["capped"]["ttft_s"]["p99"] <= 2 * by["uncapped"]["ttft_s"]["p99"]:
            continue  # not past the wall: the capped cache holds them all
        found.append(reached(f"past the wall, {name}", against, "× uncapped", 0.9, against >= 0.9))
        over = round(rates["hisparse"] / rates["capped"], 2)
        if rates["uncapped"] >= 3.3 * rates["capped"]:
            found.append(reached(f"past the wall, {name}, against capped", over, "× capped", 3.0, over >= 3))
        waited = by["hisparse"]["ttft_s"]["p99"]
        found.append(reached(f"time to first token, p99, {name}", waited, "s", 2.5, waited <= 2.5))
    return found


def _case(row: Row) -> tuple[int, int, float]:
    return row["context"], row["concurrency"], row["overlap"]


def plot(result: dict[str, Any], file: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no matplotlib here: the plot is not drawn")
        return

    usual = [row for row in result["rows"] if row["overlap"] == OVERLAP]
    contexts = list(dict.fromkeys(row["context"] for row in usual))
    figure, axes = plt.subplots(2, len(contexts), figsize=(5 * len(contexts), 7.5), squeeze=False)
    colors = {"uncapped": "#999999", "capped": "#ff7f0e", "hisparse": "#1f77b4"}
    for column, context in enumerate(contexts):
        for name, color in colors.items():
            rows = [row for row in usual if (row["context"], row["system"]) == (context, name)]
            at = [row["concurrency"] for row in rows]
            axes[0][column].plot(at, [row["tokens_s"] for row in rows], "o-", color=color, label=name)
            axes[1][column].plot(at, [row["ttft_s"]["p99"] for row in rows], "o-", color=color, label=name)
        for line, text in ((0, "tokens/s"), (1, "s to first token, p99")):
            axes[line][column].set_xscale("log", base=2)
            axes[line][column].set_yscale("log")
            axes[line][column].set_xlabel("clients")
            axes[line][column].set_ylabel(text)
            axes[line][column].set_title(f"{context:,} tokens each", fontsize=9)
        axes[0][column].legend(fontsize=7)
    figure.suptitle(f"Decode past the wall of GPU memory, {result['machine']['device']}, overlap {OVERLAP}")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments.add_argument("--size", choices=sorted(SIZES), default="full")
    chosen = arguments.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    size, device = SIZES[chosen.size], "cpu" if chosen.size == "tiny" else "cuda"
    began = time.perf_counter()
    rows: list[Row] = []
    result: dict[str, Any] = {
        "machine": {"device": platform.machine() if device == "cpu" else torch.cuda.get_device_name()},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__},
        "size": chosen.size,
        "rows": rows,
    }
    for row in run(size, tiny() if device == "cpu" else steered.spec(), device, lambda text: print(text, flush=True)):
        print(json.dumps(row), flush=True)
        rows.append(row)
        result["seconds"] = round(time.perf_counter() - began, 1)
        result["reach"] = reach(rows) if device != "cpu" else []  # nothing there is a wall, and nothing is fetched
        # Each time: a run that is cut off leaves what it has measured.
        (chosen.out / "hisparse.json").write_text(json.dumps(result, indent=1) + "\n")
    for entry in result["reach"]:
        print(entry)
    plot(result, chosen.out / "hisparse.png")


if __name__ == "__main__":
    main()
