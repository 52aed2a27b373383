"""The device's decode step and prefill of several ranks against those of one, with the same weights.

What a rank adds is summed in another order, so logits (standard deviation 4) may differ by rounding; tokens may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from glm52_engine.checkpoint import load_weights, read_model_spec
from glm52_engine.checkpoint.quantization import Fp8
from glm52_engine.kernels import linear
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.model import spread
from glm52_engine.model.device import DecodeStep, DevicePool
from glm52_engine.model.device_weights import DeviceWeights, device_weights
from glm52_engine.model.prefill import Prefill
from glm52_engine.model.sparse_pool import SparsePool
from tests.engine.checkpoint.support import fp8, quantized, random_tensors, write
from tests.engine.kernels.test_steps import BLOCK, CONFIG
from tests.engine.kernels.together import Rank, Together, poisoned
from tests.engine.model.support import prompt

TOLERANCE = 1e-4
NOBODY = 299
"""A token of which the embedding is NaN: only padding has it."""

LONGEST, BLOCKS = 20, 24
LENGTHS = (3, 11, 14, 6)
"""Of the contexts before the first step, below and above index_topk."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, gpu: bool) -> Path:
    if gpu:
        pytest.skip("float32 shapes of the interpreter; on GPUs bench/experts.py compares at full size")
    return write(tmp_path_factory.mktemp("spread") / "m", fp8(CONFIG), quantized(random_tensors(CONFIG)))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "splits_for", lambda n, rows: 1)


def loaded(checkpoint: Path, kept: Fp8, experts: range | None = None) -> DeviceWeights:
    spec = read_model_spec(checkpoint)
    weights = device_weights(spec, load_weights(checkpoint, spec, fp8=kept), "cpu", experts)
    weights.embed[NOBODY] = torch.nan
    return weights


def table(sequence: int) -> list[int]:
    return [(7 * (5 * sequence + block)) % BLOCKS for block in range(LONGEST // BLOCK)]


def kv(layout: KvLayout) -> torch.Tensor:
    """Some context's KV in every block, as bytes of a pool."""
    drawn = torch.randn(BLOCKS, layout.block_bytes // 4, generator=torch.Generator().manual_seed(5))
    return drawn.view(torch.uint8)


class Decode:
    """A rank's decode step over the contexts of some sequences."""

    def __init__(
        self, weights: DeviceWeights, sequences: Sequence[int], batch: int, *, hot: bool | None = None,
        exchange: Rank | None = None,
    ) -> None:  # fmt: skip
        """`hot`: a `SparsePool`, whole contexts or not; None: a `DevicePool`."""
        layout = KvLayout.of(weights.spec, BLOCK)
        self.rows, self._whole = len(sequences), bool(hot)
        pool: DevicePool | SparsePool
        if hot is None:
            pool = DevicePool(weights.spec, BLOCKS, BLOCK, layout.dtype, "cpu")
            pool.tensor.copy_(kv(layout).view(pool.tensor.dtype))
        else:
            host = Pool(layout, BLOCKS)
            pool = SparsePool(
                weights.spec, host, seats=batch, rows=CONFIG["index_topk"] + 2, device="cpu",
                longest=LONGEST // BLOCK if hot else None, debug=True,
            )  # fmt: skip
            host.tensor.copy_(kv(layout))
        self.pool = pool
        larger: DecodeStep | None = None
        with poisoned():
            if exchange is not None:
                larger = DecodeStep(weights, pool, batch=batch + 3, longest=LONGEST, vocab_bound=290, exchange=exchange)
            self.step = DecodeStep(
                weights, pool, batch=batch, longest=LONGEST, vocab_bound=290, exchange=exchange, larger=larger
            )
        step = self.step
        step.active.fill_(self.rows)
        step.tokens.fill_(NOBODY)
        for row, sequence in enumerate(sequences):
            length, blocks = LENGTHS[sequence], table(sequence)
            step.tokens[row], step.positions[row], step.lengths[row] = 40 + sequence, length, length + 1
            step.table[row], step.seats[row] = torch.tensor(blocks), row
            if isinstance(pool, SparsePool):
                pool.begin(row, blocks, arrived=length)
        if isinstance(pool, SparsePool) and hot:
            pool.hot.settle({})
            step.frames[: self.rows] = pool.hot.frames[: self.rows]

    def run(self) -> tuple[torch.Tensor, list[int]]:
        self.step.run(whole=self._whole)
        return self.step.logits[: self.rows].clone(), self.step.chosen[int(self.step.turn), : self.rows].tolist()


STEPS = 2


@pytest.mark.parametrize(
    ("dealt", "batch", "kept", "hot"),
    [
        pytest.param([(0, 1, 2, 3)], 4, "dequantize", None, id="one rank"),
        pytest.param([(0, 1, 2), (3,)], 4, "dequantize", None, id="two ranks"),
        pytest.param([(2, 0), (3, 1)], 2, "keep", None, id="fp8"),
        # Of four ranks with three experts one has none.
        pytest.param([(), (1, 3), (0,), (2,)], 2, "dequantize", None, id="four ranks, one without rows"),
        pytest.param([(0,), (), (), ()], 1, "keep", None, id="four ranks, one with rows"),
        pytest.param([(3, 1), (0, 2)], 2, "dequantize", False, id="hot buffers"),
        pytest.param([(3,), (0, 2)], 2, "keep", True, id="whole beside hot buffers"),
    ],
)
def test_decode_steps_of_ranks_are_those_of_one(
    checkpoint: Path, dealt: Sequence[Sequence[int]], batch: int, kept: Fp8, hot: bool | None
) -> None:
    sequences = [sequence for part in dealt for sequence in part]
    one = Decode(loaded(checkpoint, kept), sequences, len(sequences))
    want = [one.run() for _ in range(STEPS)]
    spec = one.step._weights.spec
    together = Together(len(dealt), dim=spec.hidden_size, top=spec.num_experts_per_tok)

    def run(rank: Rank) -> list[tuple[torch.Tensor, list[int]]]:
        weights = loaded(checkpoint, kept, rank.experts(spec.n_routed_experts))
        assert all(
            len(layer.up.weight) == len(weights.experts) + 1 for layer in weights.layers if layer.gate is not None
        )
        decode = Decode(weights, dealt[rank.rank], batch, hot=hot, exchange=rank)
        return [decode.run() for _ in range(STEPS)]

    found = together.each(run)
    for number, (logits, tokens) in enumerate(want):
        assert [token for rank in found for token in rank[number][1]] == tokens
        assert (torch.cat([rank[number][0] for rank in found]) - logits).abs().max() < TOLERANCE
    layers = sum(map(spec.is_moe, range(spec.num_hidden_layers)))
    assert all(calls == together.calls[0] for calls in together.calls)
    assert [name for name, _ in together.calls[0]] == ["gather", "swap"] * layers * STEPS
    assert together.sent == [len(part) * layers * STEPS for part in dealt]


def chunk(ids: Sequence[int], blocks: Sequence[int], start: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and tables of rows of one sequence."""
    positions = torch.arange(start, start + len(ids))
    return torch.tensor(list(ids)), positions, torch.tensor(blocks, dtype=torch.int32).expand(len(ids), -1)


@pytest.mark.parametrize(
    ("counts", "bucket", "kept"),
    [
        pytest.param((7, 12), 12, "dequantize", id="two ranks"),
        pytest.param((7, 12), 13, "keep", id="fp8"),
        pytest.param((0, 3, 11, 0), 16, "dequantize", id="four ranks, two idle"),
        pytest.param((0, 0, 1, 0), 1, "keep", id="four ranks, one row"),
    ],
)
def test_a_pass_of_ranks_over_prompts_is_that_of_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, counts: Sequence[int], bucket: int, kept: Fp8
) -> None:
    monkeypatch.setattr(spread, "_RANK_ROWS", 5)
    prompts = [prompt(count, seed) for seed, count in enumerate(counts)]

    def run(weights: DeviceWeights, rank: Rank | None, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        pool = DevicePool(weights.spec, BLOCKS, BLOCK, torch.float32, "cpu")
        ids = prompts[sequence]
        # As for the largest chunk that any rank may have.
        prefill = Prefill(weights, pool, most_rows=16, exchange=rank)
        with poisoned():
            if not ids:
                prefill.idle(bucket)
                return torch.empty(0), pool.tensor
            last = torch.tensor([len(ids) - 1])
            logits = prefill.run(*chunk(ids, table(sequence)), len(ids), last, bucket=None if rank is None else bucket)
        return logits, pool.tensor

    whole = loaded(checkpoint, kept)
    spec = whole.spec
    together = Together(len(counts), dim=spec.hidden_size, top=spec.num_experts_per_tok)
    found = together.each(
        lambda rank: run(loaded(checkpoint, kept, rank.experts(spec.n_routed_experts)), rank, rank.rank)
    )
    for sequence, count in enumerate(counts):
        logits, written = found[sequence]
        if not count:
            assert not written.any(), "a rank without rows writes no KV"
            continue
        want, expected = run(whole, None, sequence)
        assert (logits - want).abs().max() < TOLERANCE
        assert logits.argmax(1).tolist() == want.argmax(1).tolist()
        assert (written - expected).abs().max() < TOLERANCE
    assert all(calls == together.calls[0] for calls in together.calls)
    assert together.sent == [count * sum(map(spec.is_moe, range(spec.num_hidden_layers))) for count in counts]


def test_a_bucket_below_the_rows_is_refused(checkpoint: Path) -> None:
    together = Together(2, dim=CONFIG["hidden_size"], top=CONFIG["num_experts_per_tok"])

    def run(rank: Rank) -> None:
        weights = loaded(checkpoint, "dequantize", rank.experts(3))
        pool = DevicePool(weights.spec, BLOCKS, BLOCK, torch.float32, "cpu")
        prefill = Prefill(weights, pool, most_rows=16, exchange=rank)
        for bucket in (None, 2):
            with pytest.raises(ValueError, match=f"bucket: found {bucket} for 3 rows"):
                prefill.run(*chunk([1, 2, 3], table(0)), 3, torch.tensor([2]), bucket=bucket)

    together.each(run)


def test_weights_that_nobody_else_has_or_everybody_are_refused(checkpoint: Path) -> None:
    mine, whole = loaded(checkpoint, "dequantize", range(1, 3)), loaded(checkpoint, "dequantize")
    pool = DevicePool(whole.spec, BLOCKS, BLOCK, torch.float32, "cpu")
    with pytest.raises(ValueError, match="weights of experts 1 to 2, expected all 3"):
        DecodeStep(mine, pool, batch=1, longest=LONGEST, vocab_bound=290)
    both = Together(2, dim=CONFIG["hidden_size"], top=CONFIG["num_experts_per_tok"])
    with pytest.raises(ValueError, match="rank 1 of 2: weights of 3 of 3 experts"):
        Prefill(whole, pool, most_rows=4, exchange=Rank(both, 1))


def test_experts_of_other_ranks_are_not_taken(checkpoint: Path) -> None:
    spec = read_model_spec(checkpoint)
    weights = load_weights(checkpoint, spec, fp8="keep")
    whole = loaded(checkpoint, "keep")
    mine = device_weights(spec, weights, "cpu", range(1, 2))
    left = {
        name.split(".experts.")[1].split(".")[0] for name in [*weights.tensors, *weights.fp8] if ".experts." in name
    }
    assert left == {"0", "2"}
    for layer, all_of_it in zip(mine.layers, whole.layers, strict=True):
        at = [1, 3] if layer.gate is not None else [0]
        for part in ("up", "down"):
            assert torch.equal(getattr(layer, part).weight.float(), getattr(all_of_it, part).weight.float()[at])
