"""What it costs that the experts of a layer lie on several GPUs: decode steps of ranks that exchange their rows.

    python -m bench.experts [--out docs/benchmarks] [--tiny]

On all GPUs of the machine, one process with a thread a rank, as a pod has them: the product's own crew, books,
executors and collectives. GLM-5.2's layer dimensions, 4 layers, 32 experts over all ranks. Every rank decodes as many
rows.

  alone      one rank with all experts, without an exchange
  one        one rank with all experts that exchanges with itself: what the collectives' nodes cost in a graph
  all        a rank on every GPU, each with its share of the experts
  one -, all -    the same with local copies in place of the collectives: the time of everything else

`step_ms` is a graph's time on the device, the slowest rank's; `served_ms` the time from token to token with
launch-ahead, as requests see it, and `boundary_us` what that is more. `gather_us` and `swap_us` are one collective's
time in a graph of its own; `share` is what of a step is theirs. Local copies give every rank's experts the own rows, so
that few rows meet fewer experts than in the step they are held against.

Tokens are those of the one rank that exchanges with itself. Those of the rank without an exchange may be others: there
the choice's weights are normalised in another order of addition, and with random weights a near-tie is never far.

--tiny: a small model on the CPU, where nothing but the tokens means anything. It needs Triton's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench import shapes
from bench.report import reached
from glm52_engine.checkpoint.config import ModelSpec, parse_model_spec
from glm52_engine.kernels.spread import Travelling
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.model.device_weights import DeviceWeights, device_weights
from glm52_engine.model.exchange import Exchange
from glm52_engine.ranks.books import Books
from glm52_engine.ranks.captures import Captures
from glm52_engine.ranks.collectives import Collectives, LateExchange, serve_store
from glm52_engine.ranks.crew import Crew
from glm52_engine.ranks.device import ShardedDeviceExecutor
from glm52_engine.ranks.lane import Lane
from glm52_engine.ranks.load import HostParts
from glm52_engine.ranks.messages import Join
from glm52_engine.ranks.spans import RankSpan, experts_of
from glm52_engine.runtime.device import executor as device_executor
from glm52_engine.runtime.device.room import Room
from glm52_engine.runtime.measures import Measures
from glm52_engine.runtime.rank import Running, StepLimits
from glm52_engine.runtime.types import Sampling
from glm52_engine.schedule import Limits, blocks_for

LOOPBACK = "127.0.0.1"
REPEATED = 16
"""Collectives in a graph of their own."""

Tokens = dict[tuple[int, int], list[int]]
"""By prompts' group and row."""


@dataclass(frozen=True)
class Size:
    spec: ModelSpec
    world: int
    rows: tuple[int, ...]
    context: int
    tokens: int
    chunk: int
    block: int
    steps: int
    """Replays that are timed; with five more they must fit behind the context, where `tokens` do."""
    device: Callable[[int], str]

    @property
    def cuda(self) -> bool:
        return self.device(0) != "cpu"

    @property
    def seat_blocks(self) -> int:
        return blocks_for(self.context + self.tokens + 1, self.block)


def full() -> Size:
    return Size(
        shapes.spec(), torch.cuda.device_count(), rows=(8, 32, 64), context=2048, tokens=64, chunk=8192, block=64,
        steps=40, device=lambda rank: f"cuda:{rank}",
    )  # fmt: skip


def tiny() -> Size:
    config = shapes.config() | {
        "num_hidden_layers": 2, "indexer_types": ["full", "shared"], "index_skip_topk_offset": 1, "index_topk": 8,
        "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "index_n_heads": 4,
        "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "qk_head_dim": 32,
        "head_dim": 16, "v_head_dim": 16, "index_head_dim": 32, "vocab_size": 64, "pad_token_id": 0,
        "eos_token_id": [1], "max_position_embeddings": 64,
    }  # fmt: skip
    spec = parse_model_spec(config, Path("bench/experts.py"))
    return Size(spec, 2, rows=(2,), context=6, tokens=5, chunk=12, block=4, steps=1, device=lambda rank: "cpu")


@dataclass(frozen=True)
class Case:
    name: str
    world: int
    exchange: Literal["none", "real", "copies"]


def cases(world: int) -> list[Case]:
    found = [Case("alone", 1, "none"), Case("one", 1, "real"), Case("one -", 1, "copies")]
    return found if world == 1 else [*found, Case("all", world, "real"), Case("all -", world, "copies")]


class Copies:
    """An `Exchange` that asks nobody: as if all ranks had this one's rows."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def gather(self, own: torch.Tensor, everyone: torch.Tensor) -> None:
        everyone.copy_(own.expand_as(everyone))

    def swap(self, parts: torch.Tensor, back: torch.Tensor) -> None:
        back.copy_(parts)


def weights_of(size: Size, rank: int, world: int) -> DeviceWeights:
    """The same model on every GPU, of its experts the rank's."""
    device = size.device(rank)
    mine = experts_of(range(rank, rank + 1), world=world, experts=size.spec.n_routed_experts)
    return device_weights(size.spec, shapes.random_tensors(size.spec, device), device, mine)


def host_parts(case: Case, weights: Sequence[DeviceWeights], size: Size, captures: Captures) -> HostParts:
    """As `ranks.load` makes them from a checkpoint."""
    spec, seats = size.spec, max(size.rows)
    layout, blocks = KvLayout.of(spec, size.block), seats * size.seat_blocks
    limits = Limits(size.context + size.tokens + 1, size.block, seats, blocks, spec.vocab_size)
    step = StepLimits(size.chunk, size.chunk, spec.vocab_size, frozenset())
    late = [LateExchange(rank, case.world) for rank in range(case.world)]
    pools = [Pool(layout, blocks, _host_memory(blocks * layout.block_bytes, size)) for _ in late]

    def made(rank: int) -> ShardedDeviceExecutor:
        kinds: dict[str, Exchange | None] = {"none": None, "real": late[rank], "copies": Copies(rank, case.world)}
        executor = ShardedDeviceExecutor(
            weights[rank], pools[rank], seats=seats, blocks_per_seat=size.seat_blocks, vocab_bound=spec.vocab_size,
            step_tokens=size.chunk, exchange=kinds[case.exchange],
        )  # fmt: skip
        executor.room = Room(rank, functools.partial(_memory, size.device(rank)))
        return executor

    executors = [made(rank) for rank in range(case.world)]

    def joined(place: int, lane: Lane) -> ShardedDeviceExecutor:
        late[place].meet(lane.collectives)
        executors[place].meet(lane, captures)
        return executors[place]

    def close() -> None:
        for executor in executors:
            executor.close()

    devices = [torch.device(size.device(rank)) for rank in range(case.world)]
    measures = Measures(spec, layout, limits, step, None)
    return HostParts(measures, pools, {}, devices, joined, abandon=captures.abandon, close=close)


def _host_memory(count: int, size: Size) -> torch.Tensor:
    memory = torch.zeros(count, dtype=torch.uint8)
    return memory.pin_memory() if size.cuda else memory


def _memory(device: str) -> tuple[int, int]:
    return (0, 0) if device == "cpu" else torch.cuda.mem_get_info(device)


async def serve(crew: Crew, books: Books, groups: Sequence[int], rows: int, size: Size) -> tuple[Tokens, float]:
    """Each rank continues the prompts of one group. Tokens, and milliseconds from one full step to the next."""
    tokens: Tokens = {}
    for rank, group in enumerate(groups):
        for row in range(rows):
            draw = torch.Generator().manual_seed(1000 * group + row)
            prompt = tuple(torch.randint(2, size.spec.vocab_size, (size.context,), generator=draw).tolist())
            blocks = tuple(range(row * size.seat_blocks, (row + 1) * size.seat_blocks))
            sampling = Sampling(size.tokens, temperature=0.0, ignore_eos=True)
            books.start(rank, Running(f"{group} {row}", row, blocks, prompt, sampling, 0, False))
            tokens[group, row] = []
    full: list[float] = []
    while (planned := books.next()) is not None:
        shape, orders = planned
        results = await crew.execute(shape, orders)
        for event in itertools.chain(*books.settle(results)):
            group, row = map(int, event.key.split())
            tokens[group, row] += [] if event.token is None else [event.token.id]
        if shape.flags.consume and min(shape.active_rows) == rows:
            full.append(time.perf_counter())
    between = sorted(after - before for before, after in itertools.pairwise(full))
    return tokens, 1000 * between[len(between) // 2] if between else float("nan")


def timed(run: Callable[[], object], count: int, *, cuda: bool) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds, on the current stream; as many runs on every rank."""
    for _ in range(5 if cuda else 1):
        run()
    if cuda:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    else:
        stamps = [time.perf_counter()]
        for _ in range(count):
            run()
            stamps.append(time.perf_counter())
        times = sorted(1000 * (b - a) for a, b in itertools.pairwise(stamps))
    return times[count // 2], times[min(count - 1, int(count * 0.99))]


@torch.inference_mode()
def time_step(executor: ShardedDeviceExecutor, rows: int, size: Size) -> tuple[float, float]:
    """The graph of so many rows, over and over, at the end of the prompts that `serve` has left in the cache."""
    bucket = executor._buckets[rows]
    bucket.load([(2 + row % 32, size.context, row) for row in range(rows)], executor._tables)
    executor._loaded = executor._expected = None
    return timed(bucket.replay, size.steps, cuda=size.cuda)


@torch.inference_mode()
def time_collectives(
    collectives: Collectives, captures: Captures, device: torch.device, rows: int, size: Size
) -> dict[str, float]:
    """Microseconds of one gather and of one swap, as a layer of a decode step has them."""
    spec, world = size.spec, collectives.world
    dtype = getattr(torch, spec.dtype)
    own, everyone = (
        Travelling(n, rows, spec.hidden_size, spec.num_experts_per_tok, dtype=dtype, device=device).raw.zero_()
        for n in (1, world)
    )
    parts = torch.zeros(world, rows, spec.hidden_size, device=device)
    back = torch.empty_like(parts)
    found = {}
    for name, run in (
        ("gather", lambda: collectives.gather(own[0], everyone)),
        ("swap", lambda: collectives.swap(parts, back)),
    ):
        run()
        repeated = _graph(run, device, captures) if size.cuda else lambda run=run: [run() for _ in range(REPEATED)]
        found[name] = 1000 * timed(repeated, size.steps, cuda=size.cuda)[0] / REPEATED
    return found


def _graph(run: Callable[[], None], device: torch.device, captures: Captures) -> Callable[[], None]:
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with captures.turn(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATED):
            run()
    torch.cuda.synchronize(device)
    return graph.replay


async def measure(case: Case, weights: Sequence[DeviceWeights], size: Size) -> list[tuple[dict[str, Any], Tokens]]:
    """A row of the table for each number of rows, with the tokens of its prompts."""
    captures = Captures(case.world)
    parts = host_parts(case, weights, size, captures)
    store, group = serve_store(LOOPBACK), uuid.uuid4().hex
    crew = Crew(RankSpan("bench", 0, case.world), case.world, parts)
    # What one rank says is held against what the first and the last of all say.
    batches = [list(range(case.world))] if case.world > 1 else [[other] for other in sorted({0, size.world - 1})]
    books = Books(case.world, limits=parts.measures.step, block_size=size.block, launch_ahead=True)
    found = []
    try:
        await crew.join(Join(LOOPBACK, store.port, group), LOOPBACK)
        for rows in size.rows:
            tokens: Tokens = {}
            for batch in batches:
                said, served = await serve(crew, books, batch, rows, size)
                tokens |= said
            executors: Any = crew.executors
            times = await crew._each([functools.partial(time_step, each, rows, size) for each in executors])
            step = max(median for median, _ in times)
            row: dict[str, Any] = {
                "case": case.name, "world": case.world, "rows": rows, "step_ms": round(step, 3),
                "p99_ms": round(max(p99 for _, p99 in times), 3), "served_ms": round(served, 3),
                "boundary_us": round(1000 * (served - step), 1),
            }  # fmt: skip
            if case.exchange != "copies":
                again, _ = await serve(crew, books, batches[0], rows, size)
                row["same_again"] = same(again, tokens)
            if case.exchange == "real":
                alone = await crew._each(
                    [
                        functools.partial(time_collectives, each.lane.collectives, captures, device, rows, size)
                        for each, device in zip(executors, parts.devices, strict=True)
                    ]
                )
                row |= {f"{name}_us": round(max(one[name] for one in alone), 1) for name in ("gather", "swap")}
            found.append((row, tokens))
    finally:
        crew.leave()
        if crew.wait(10):
            parts.close()
    return found


def same(found: Tokens, truth: Tokens) -> float:
    """Share of tokens that are the same, up to each output's first that is not, over prompts that both have."""
    both = found.keys() & truth.keys()
    equal = sum(
        sum(itertools.takewhile(bool, (a == b for a, b in zip(found[key], truth[key], strict=True)))) for key in both
    )
    return round(equal / sum(len(truth[key]) for key in both), 4)


def table(size: Size) -> list[dict[str, Any]]:
    """All rows, told as they come."""
    device_executor.bucket_sizes = lambda seats: list(size.rows)  # none but these is measured
    rows: list[dict[str, Any]] = []
    tokens: dict[tuple[str, int], Tokens] = {}
    weights: list[DeviceWeights] = []
    for case in cases(size.world):
        if len(weights) != case.world:
            weights.clear()
            torch.cuda.empty_cache()
            weights += [weights_of(size, rank, case.world) for rank in range(case.world)]
        for row, said in asyncio.run(measure(case, weights, size)):
            tokens[case.name, row["rows"]] = said
            if case.exchange == "real":
                row["same_as_alone"] = same(said, tokens["alone", row["rows"]])
            if case.name == "all":
                row["same_as_one"] = same(said, tokens["one", row["rows"]])
            rows.append(row)
            print("  ".join(f"{key} {value:>7}" for key, value in row.items()), flush=True)
    by = {(row["case"], row["rows"]): row for row in rows}
    for (name, count), row in by.items():
        if (without := by.get((f"{name} -", count))) is not None:
            row["share"] = round(1 - without["step_ms"] / row["step_ms"], 3)
            print(f"{name}, {count} rows: {row['share']:.1%} of a step are collectives")
    return rows


def reach(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the figures should be, and whether they are."""
    found = []
    alone = {row["rows"]: row["step_ms"] for row in rows if row["case"] == "alone"}
    for row in rows:
        if row["case"] == "one":
            ratio = round(row["step_ms"] / alone[row["rows"]], 3)
            found.append(reached(f"an exchange with nobody, {row['rows']} rows", ratio, "x alone", 1.2, ratio <= 1.2))
        if "same_again" in row:
            name = f"the same tokens again, {row['case']}, {row['rows']} rows"
            found.append(reached(name, row["same_again"], "", 1.0, row["same_again"] == 1))
        if row["case"] == "all":
            value = row["same_as_one"]
            # Sums of other ranks' experts are added in another order: a near-tie may fall the other way.
            found.append(reached(f"the tokens of one rank, {row['rows']} rows", value, "", 0.99, value >= 0.99))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments.add_argument("--tiny", action="store_true", help="on the CPU, in Triton's interpreter")
    chosen = arguments.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    size = tiny() if chosen.tiny else full()
    rows = table(size)
    result = {
        "machine": {"gpu": torch.cuda.get_device_name() if size.cuda else "none", "gpus": size.world},
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "nccl": torch.cuda.nccl.version() if size.cuda else None},
        "rows": rows,
        "reach": reach(rows),
    }
    (chosen.out / "experts.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as a pod does: threads of the collectives have no end of their own
