"""Whatever requests bring, no kernel is compiled after the start: the first of them would wait for it.

Kernels do not run here. A launch is recorded by what Triton compiles a kernel anew for, and what would be computed is
whatever memory holds; which kernels are launched how follows from shapes alone.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm52_engine.checkpoint import load_weights, read_model_spec
from glm52_engine.config import KvCacheDtype
from glm52_engine.kernels import hisparse, mla
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.kv.hisparse import hot
from glm52_engine.model import Span
from glm52_engine.model.device_weights import device_weights
from glm52_engine.ranks.books import bucket_of
from glm52_engine.ranks.device import ShardedDeviceExecutor
from glm52_engine.ranks.messages import Flags, Shape
from glm52_engine.runtime.device import executor as executors
from glm52_engine.runtime.device.buckets import warm_sizes
from glm52_engine.runtime.device.executor import DeviceExecutor
from glm52_engine.runtime.device.late import Late, watch
from glm52_engine.schedule import blocks_for, launch_ahead
from tests.engine.checkpoint.support import fp8, quantized, random_tensors, write
from tests.engine.kernels.test_steps import CONFIG
from tests.engine.kernels.together import Rank, Together

BLOCK, SEATS, BLOCKS, LONGEST = 4, 5, 40, 9001
"""A seat's blocks are no multiple of 4: tables of other seats begin at other alignments. Contexts of several parts."""

MOST_ROWS = 400

Key = tuple[Any, ...]


def key_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Key:
    """What a launch is compiled for. As `native_specialize_impl` and `JITFunction.run` have it in Triton."""
    signature = inspect.signature(kernel.fn)
    named = {name: value for name, value in options.items() if name in signature.parameters}
    given = signature.bind(*args, **named).arguments
    any_value = kernel.kwargs["do_not_specialize"] or ()
    any_place = kernel.kwargs["do_not_specialize_on_alignment"] or ()

    def kind(name: str, value: Any) -> Any:
        if "constexpr" in str(signature.parameters[name].annotation) or value is None:
            return ("is", value)
        if isinstance(value, torch.Tensor):
            aligned = value.data_ptr() % 16 == 0 and name not in (*any_value, *any_place)
            return ("tensor", value.dtype, aligned)
        if isinstance(value, bool | float):
            return type(value).__name__
        if name in any_value:
            return ("int", value.bit_length() > 31)
        if value == 1:
            return ("is", 1)
        return ("int", value.bit_length() > 31, value % 16 == 0 and name not in any_place)

    kinds = tuple((name, kind(name, value)) for name, value in given.items())
    others = {name: value for name, value in options.items() if name not in named}
    return (kernel.fn.__name__, tuple(any_value), kinds, tuple(sorted(others.items())))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> set[Key]:
    """Of every launch, what it is compiled for."""
    if gpu:
        pytest.skip("kernels are launched there; the log says what is compiled late")
    from triton.runtime.interpreter import InterpretedFunction

    found: set[Key] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add(key_of(self, args, options))

    monkeypatch.setattr(InterpretedFunction, "run", run)
    monkeypatch.setattr(executors, "check_finite", lambda logits: None)
    monkeypatch.setattr(hot, "_form", lambda device: hisparse)
    monkeypatch.setattr(launch_ahead, "MOST_ROWS", 4)
    return found


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA's package, which computes nothing."""

    def sparse(query: torch.Tensor, pool: Any, indices: Any, scale: float, latent: int, **options: Any) -> Any:
        return query.new_zeros(*query.shape[:2], latent), None, torch.zeros(query.shape[:2])

    def cached(query: torch.Tensor, pages: Any, a: Any, b: Any, latent: int, *rest: Any, **options: Any) -> Any:
        return query.new_zeros(*query.shape[:3], latent), None

    monkeypatch.setattr(mla, "flash_usable", lambda *shape: True)
    monkeypatch.setattr(mla, "flash_mla_sparse_fwd", sparse)
    monkeypatch.setattr(mla, "flash_mla_with_kvcache", cached)
    monkeypatch.setattr(mla, "get_mla_metadata", lambda: [None])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("start") / "m", fp8(CONFIG), quantized(random_tensors(CONFIG)))


def made(
    checkpoint: Path, kind: type[DeviceExecutor] = DeviceExecutor, *, keep: bool = True, kv: KvCacheDtype = "auto",
    longest: int = LONGEST, **options: Any,
) -> Any:  # fmt: skip
    spec = read_model_spec(checkpoint)
    weights = device_weights(spec, load_weights(checkpoint, spec, fp8="keep" if keep else "dequantize"), "cpu")
    pool = Pool(KvLayout.of(spec, BLOCK, kv), BLOCKS)
    seat = blocks_for(longest, BLOCK)
    return kind(
        weights, pool, seats=SEATS, blocks_per_seat=seat, vocab_bound=300, step_tokens=MOST_ROWS, **options
    )  # fmt: skip


def chunk(drawn: random.Random, seat: int, most: int) -> Span:
    count = drawn.choice([1, 1, 2, 3, 4, 5, 15, 16, 17, 33, 64, 100, most])
    count = min(count, most)
    end = drawn.choice([count, count + 1, 63, 64, 2047, 2048, 2049, 4096, 5000, 9001, drawn.randrange(count, LONGEST)])
    return Span(seat, max(0, end - count), [0] * count, drawn.random() < 0.7)


def spans_of(drawn: random.Random) -> list[Span]:
    """As a step of prefill may have them: chunks of several sequences, single tokens beside them."""
    seats = drawn.sample(range(SEATS), drawn.choice([1, 1, 2, 3, SEATS]))
    left, spans = MOST_ROWS, []
    for seat in seats:
        if left:
            spans.append(chunk(drawn, seat, drawn.randint(1, left)))
            left -= len(spans[-1].tokens)
    return spans


def new_after(launches: set[Key], start: Callable[[], None], rest: Callable[[], None]) -> list[str]:
    start()
    before = set(launches)
    assert before
    rest()
    return [told_apart(key, before) for key in launches - before]


def told_apart(key: Key, known: set[Key]) -> str:
    """By what the launch differs from the most similar one at the start."""
    differences = [
        [(was, now) for was, now in zip((*other[2], *other[3]), (*key[2], *key[3]), strict=True) if was != now]
        for other in known
        if other[:2] == key[:2] and len(other[2]) == len(key[2]) and len(other[3]) == len(key[3])
    ]
    return f"{key[0]}: {min(differences, key=len, default='never launched')}"


@pytest.mark.parametrize(
    ("kv", "keep", "package"),
    [("auto", False, False), ("auto", True, True), ("fp8", True, False), ("fp8", True, True)],
    ids=["plain", "flash", "FP8", "FP8 flash"],
)
def test_prompts_of_any_size(
    checkpoint: Path, launches: set[Key], request: pytest.FixtureRequest, kv: KvCacheDtype, keep: bool, package: bool
) -> None:
    if package:
        request.getfixturevalue("flash")
    executor = made(checkpoint, keep=keep, kv=kv)
    drawn = random.Random(52)

    def steps() -> None:
        for seat in range(SEATS):
            executor.begin(seat, range(seat, BLOCKS, SEATS), arrived=seat)
        for _ in range(60):
            spans = spans_of(drawn)
            executor.launch(spans)
            if all(len(span.tokens) == 1 and span.wants_logits for span in spans) and len(spans) <= 4:
                executor.relaunch()

    assert not new_after(launches, executor.warm_up, steps)


@pytest.mark.parametrize("always", [True, False], ids=["hot", "whole"])
def test_contexts_come_and_go_beside_hot_buffers(
    checkpoint: Path, launches: set[Key], monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    monkeypatch.setattr(hot, "_ROW_ALIGNMENT", 1)
    made_ready: list[DeviceExecutor] = []

    def start() -> None:
        made_ready.append(made(checkpoint, hot_rows=CONFIG["index_topk"] + 2, hot_always=always, longest=48))
        made_ready[0].warm_up()

    def steps() -> None:
        executor, drawn = made_ready[0], random.Random(52)
        seen = set()
        seats: dict[int, int] = {}
        for _ in range(120):
            free = [seat for seat in range(SEATS) if seat not in seats]
            if free and drawn.random() < 0.4:
                seat = drawn.choice(free)
                seats[seat] = drawn.randint(1, 30)
                executor.begin(seat, range(8 * seat, 8 * seat + 8), arrived=seats[seat])
            if seats:
                spans = [Span(seat, start, [0], True) for seat, start in seats.items()]
                executor.launch(spans)
                executor.keep(spans)
                executor.settle()
                seats = {seat: start + 1 for seat, start in seats.items()}
                seen.add(executor._whole)
            for seat in [seat for seat, start in seats.items() if start >= 31 or drawn.random() < 0.1]:
                executor.end(seat)
                del seats[seat]
        assert seen == ({False} if always else {False, True})

    assert not new_after(launches, start, steps)


class Lane:
    """Of one rank."""

    world, rank = 1, 0

    def enter(self, shape: Shape) -> None:
        pass

    def leave(self) -> None:
        pass


def test_ranks_in_lock_step(checkpoint: Path, launches: set[Key], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_model_spec(checkpoint)

    def run(exchange: Rank) -> list[str]:
        executor = made(checkpoint, ShardedDeviceExecutor, exchange=exchange)
        executor.room = SimpleNamespace(taking=lambda part: SimpleNamespace(), total=0)
        executor.lane = Lane()
        drawn = random.Random(52)

        def steps() -> None:
            for number in range(1, 60):
                spans = spans_of(drawn)
                rows = sum(len(span.tokens) for span in spans)
                # Another rank may have more rows, or a prompt where here are single tokens.
                bucket = bucket_of(drawn.randint(rows, 2 * rows))
                prefill = len(spans) != rows or drawn.random() < 0.5
                executor.shape = Shape(number, bucket, (rows,), Flags(prefill=prefill))
                executor.launch(spans if number % 7 else [])

        return new_after(launches, lambda: DeviceExecutor.warm_up(executor), steps)

    together = Together(1, dim=spec.hidden_size, top=spec.num_experts_per_tok)
    monkeypatch.setattr(together, "poison", lambda rank, rows: rows)
    assert together.each(run) == [[]]


@pytest.mark.parametrize(("most", "longest", "top_k"), [(12, 40, 8), (20, 5000, 2048), (8192, 131072, 2048), (1, 1, 1)])
def test_sizes_of_the_first_chunks(most: int, longest: int, top_k: int) -> None:
    """Every number of rows and every context has one of its own power of two, and none is beyond what may come."""
    sizes = warm_sizes(most, longest, top_k)
    assert all(1 <= rows <= min(most, context) and context <= longest for rows, context in sizes)

    def power(number: int, least: int, largest: int) -> int:
        return min(largest, max(least, 1 << (number - 1).bit_length()))

    assert {power(rows, 16, 64) for rows, _ in sizes} >= {power(n, 16, 64) for n in range(1, min(most, longest) + 1)}
    assert {power(n, top_k, longest) for _, n in sizes} == {power(n, top_k, longest) for n in range(1, longest + 1)}


def test_a_gpu_more_is_watched_by_the_same_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    for index in (0, 3):
        watch(torch.device("cuda", index))
    hook = knobs.runtime.jit_post_compile_hook
    assert isinstance(hook, Late)
    assert hook.ready == {0, 3}


def told(late: Late, name: str, device: int) -> None:
    late(key="", repr=f"{name}[…]", fn=SimpleNamespace(name=name), compile={"device": device}, already_compiled=False)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_what_is_compiled_late_is_told_once_a_kernel(warnings: Callable[[], list[str]]) -> None:
    """On a device that is ready: another rank of the process may still start. Whoever listened before still does."""
    before: list[str] = []
    late = Late(lambda **given: before.append(given["fn"].name))
    told(late, "_scores", 0)
    late.ready.add(0)
    told(late, "_scores", 1)
    assert warnings() == []
    for name in ("_scores", "_scores", "_emit"):
        told(late, name, 0)
    assert ["_scores" in line or "_emit" in line for line in warnings()] == [True, True]
    assert before == ["_scores", "_scores", "_scores", "_scores", "_emit"]
