"""The device's decode step with hot buffers against the plain model that reads whole contexts, step after step."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from glm52_engine.checkpoint import load_weights, read_model_spec
from glm52_engine.config import KvCacheDtype
from glm52_engine.kernels import hisparse, linear, residency
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.model import Span
from glm52_engine.model.device import DecodeStep
from glm52_engine.model.device_weights import DeviceWeights, device_weights
from glm52_engine.model.sparse_pool import SparsePool, device_bytes
from glm52_engine.runtime.device.executor import DeviceExecutor
from tests.engine.checkpoint.support import fp8, quantized, random_tensors, write
from tests.engine.kernels.test_steps import BLOCK, CONFIG
from tests.engine.model import support
from tests.engine.model.support import Ours, prompt

TOP_K = CONFIG["index_topk"]
LENGTHS = (3, 13)
"""Below and above top-k; the first grows past it."""

STEPS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, gpu: bool) -> Path:
    if gpu:
        pytest.skip("float32 shapes of the interpreter; on a GPU bench/hisparse.py compares at full size")
    return write(tmp_path_factory.mktemp("sparse") / "m", fp8(CONFIG), quantized(random_tensors(CONFIG)))


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> DeviceWeights:
    spec = read_model_spec(checkpoint)
    return device_weights(spec, load_weights(checkpoint, spec, fp8="dequantize"), "cpu")


# Rows of this small a model in FP8 are no multiples of 16 bytes, which the Triton form needs.
@pytest.mark.parametrize(
    ("dtype", "form", "whole"), [("auto", hisparse, False), ("fp8", residency, False), ("auto", hisparse, True)]
)
def test_decode_reads_whole_contexts_through_hot_buffers(
    checkpoint: Path,
    weights: DeviceWeights,
    monkeypatch: pytest.MonkeyPatch,
    dtype: KvCacheDtype,
    form: ModuleType,
    whole: bool,
) -> None:
    monkeypatch.setattr(support, "BLOCK", BLOCK)
    monkeypatch.setattr(linear, "splits_for", lambda n, rows: 1)
    plain = Ours(checkpoint, kv_cache_dtype=dtype)
    host = Pool(plain.pool.layout, plain.pool.num_blocks)
    host.touch()
    longest = 5 if whole else None
    pool = SparsePool(weights.spec, host, seats=3, rows=TOP_K + 2, device="cpu", longest=longest, debug=True, form=form)
    step = DecodeStep(weights, pool, batch=3, longest=20, vocab_bound=300)
    step.active.fill_(len(LENGTHS))
    spans = []
    for row, length in enumerate(LENGTHS):
        seat = 2 - row
        first = int(plain.prefill(prompt(length, row), chunk=64, seat=row)[:300].argmax())
        blocks = plain.tables[row, :5].tolist()
        arrived = blocks[: -(-length // BLOCK)]
        host.tensor[arrived] = plain.pool.tensor[arrived]
        pool.begin(seat, blocks, arrived=length)
        spans.append(Span(row, length, [first], True))
        step.seats[row] = seat
        step.table[row] = plain.tables[row, :5].int()
        if whole:
            pool.hot.settle({})
            step.frames[row] = pool.hot.frames[seat]
        step.tokens[row], step.positions[row], step.lengths[row] = first, length, length + 1
    for _ in range(STEPS):
        want = plain.step(spans)
        step.run(whole=whole)
        # A sum in another order may fall on the other side of an e4m3 number's border.
        assert (step.logits[: len(spans)] - want).abs().max() < (1e-3 if dtype == "auto" else 0.1)
        chosen = want[:, :300].argmax(1).tolist()
        assert step.chosen[int(step.turn), : len(spans)].tolist() == chosen
        spans = [Span(s.seat, s.end, [token], True) for s, token in zip(spans, chosen, strict=True)]
    counters = pool.hot.counters()
    if whole:
        assert counters["fetched"] == sum(LENGTHS) * plain.pool.layout.layers, "nothing but what arrived"
    else:
        assert counters["misses"] > STEPS
        assert counters["hits"] > 0
    assert counters["unwritten"] == counters["out of bounds"] == 0
    # The new rows of every layer, to the last one, are the host's.
    size = plain.pool.layout.mla_row_bytes
    for span in spans:
        block, offset = int(plain.tables[span.seat, (span.start - 1) // BLOCK]), (span.start - 1) % BLOCK
        for layer in range(plain.pool.layout.layers):
            at = (layer * BLOCK + offset) * size
            new, old = (x[block, at : at + size] for x in (host.tensor, plain.pool.tensor))
            if dtype == "auto":
                assert (new.view(torch.float32) - old.view(torch.float32)).abs().max() < 1e-4
            else:
                assert (new == old).float().mean() > 0.9


def test_closing_unpins_once_and_tells_nothing_more(weights: DeviceWeights) -> None:
    pool = Pool(KvLayout.of(weights.spec, BLOCK), 10)
    unpinned: list[bool] = []
    executor = DeviceExecutor(
        weights, pool, seats=2, blocks_per_seat=5, vocab_bound=300, step_tokens=8, hot_rows=TOP_K + 2,
        unpin=lambda: unpinned.append(hasattr(executor, "pool")),
    )  # fmt: skip
    assert executor.hot_counters() is not None
    executor.close()
    executor.close()
    # By then nobody has the memory any more, and there is nobody to ask.
    assert unpinned == [False]
    assert executor.hot_counters() is None


@pytest.mark.parametrize(("blocks", "seats", "rows"), [(10, 3, 8), (40, 1, 20)])
def test_bytes_on_the_device(weights: DeviceWeights, blocks: int, seats: int, rows: int) -> None:
    layout = KvLayout.of(weights.spec, BLOCK)
    pool = SparsePool(weights.spec, Pool(layout, blocks), seats=seats, rows=rows, device="cpu")
    residency = pool.hot.residency
    taken = (residency.owner, residency.order, residency.where, pool.hot.hot, pool._keys)
    found = sum(tensor.nbytes for tensor in taken)
    counted = device_bytes(layout, blocks=blocks, seats=seats, rows=rows)
    # A layer's hot rows are rounded up to whole pages; the spare seat has none.
    assert abs(found - counted) <= layout.layers * layout.mla_row_bytes * (64 + rows + 1)
