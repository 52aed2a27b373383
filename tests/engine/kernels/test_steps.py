"""The device's decode step and prefill against the plain model: same KV, same logits, in Triton's interpreter.

The checkpoint is FP8 in every case: the plain model computes with its values, the device with them or with FP8 itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import shapes
from glm52_engine.checkpoint import Fp8Weight, load_weights, read_model_spec
from glm52_engine.checkpoint.architectures import tiny_config
from glm52_engine.checkpoint.quantization import Fp8
from glm52_engine.checkpoint.tensors import expected_tensors, is_scale
from glm52_engine.config import KvCacheDtype
from glm52_engine.kernels import linear, rows
from glm52_engine.kernels.reference import index_scores, select_top_k
from glm52_engine.kv import KvLayout
from glm52_engine.model import Span, prefill
from glm52_engine.model.device import DecodeStep, DevicePool
from glm52_engine.model.device_weights import DeviceWeights, LayerWeights, device_weights
from glm52_engine.model.matrix import Matrix
from tests.engine.checkpoint.support import fp8, quantized, random_tensors, spec_of, write
from tests.engine.model import support
from tests.engine.model.support import Ours, prompt

CONFIG = tiny_config() | {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "full", "shared"],
    "index_skip_topk_offset": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 3,
    "index_topk": 8,
    "index_n_heads": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 48,
    "qk_head_dim": 64,
    # Whole blocks where the next part is joined to them in FP8; else one and a quarter, and the dense one ends in one.
    "q_lora_rank": 128,
    "moe_intermediate_size": 128,
    "hidden_size": 160,
    "v_head_dim": 80,
    "intermediate_size": 200,
}

BLOCK = 4

LENGTHS = (3, 11)
"""Below and above index_topk."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, gpu: bool) -> Path:
    if gpu:
        pytest.skip("float32 shapes of the interpreter; on a GPU bench/parity.py compares at full size")
    return write(tmp_path_factory.mktemp("steps") / "m", fp8(CONFIG), quantized(random_tensors(CONFIG)))


def on_device(checkpoint: Path, kept: Fp8) -> DeviceWeights:
    spec = read_model_spec(checkpoint)
    return device_weights(spec, load_weights(checkpoint, spec, fp8=kept), "cpu")


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_prefill_and_decode_are_the_plain_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kv: KvCacheDtype
) -> None:
    monkeypatch.setattr(support, "BLOCK", BLOCK)
    monkeypatch.setattr(linear, "splits_for", lambda n, rows: 2)  # eight programs where two show the same
    plain = Ours(checkpoint, kv_cache_dtype=kv)
    both = on_device(checkpoint, "dequantize"), on_device(checkpoint, "keep")
    pool = DevicePool(both[0].spec, plain.pool.num_blocks, BLOCK, plain.pool.layout.dtype, "cpu")
    assert pool.layout == plain.pool.layout
    steps = [DecodeStep(weights, pool, batch=3, longest=12, vocab_bound=300) for weights in both]
    spans = []
    for seat, (length, weights) in enumerate(zip(LENGTHS, both, strict=True)):
        ids = prompt(length, seat)
        want = plain.prefill(ids, chunk=64, seat=seat)
        table = plain.tables[seat, :3].int()
        got = prefill.Prefill(weights, pool, most_rows=64).run(
            torch.tensor(ids), torch.arange(length), table.expand(length, -1), length, torch.tensor([length - 1]),
            together=4,
        )[0]  # fmt: skip
        # A sum in another order may fall on the other side of an e4m3 number's border, 1/16 away.
        tolerance = 1e-3 if kv == "auto" else 0.1
        assert (got - want).abs().max() < tolerance
        spans.append(Span(seat, length, [int(got[:300].argmax())], True))
        for step in steps:
            step.active.fill_(2)
            step.table[seat] = table
            step.tokens[seat], step.positions[seat], step.lengths[seat] = spans[-1].tokens[0], length, length + 1
    before = pool.tensor.clone()
    want = plain.step(spans)
    for step in steps:
        pool.tensor.copy_(before)
        step.run()
        assert (step.logits[:2] - want).abs().max() < tolerance
        assert step.chosen[1, :2].tolist() == want[:, :300].argmax(1).tolist()
        assert step.tokens[:2].tolist() == step.chosen[1, :2].tolist()
        assert step.positions.tolist() == [4, 12, 0], "a padding row stays where it is"
        changed = (pool.tensor != before).any(1).nonzero().flatten().tolist()
        assert changed == sorted(int(plain.tables[seat, length // BLOCK]) for seat, length in enumerate(LENGTHS))


def matrices(layer: LayerWeights) -> dict[str, Matrix]:
    return {name: getattr(layer, name) for name in ("a", "b", "o", "up", "down")}


def values(matrix: Matrix) -> torch.Tensor:
    if matrix.scale is None:
        return matrix.weight
    if matrix.weight.dim() == 3:
        return torch.stack([values(Matrix(*pair)) for pair in zip(matrix.weight, matrix.scale, strict=True)])
    return Fp8Weight(matrix.weight, matrix.scale).dequantize(torch.float32)


def test_what_stays_fp8(checkpoint: Path) -> None:
    kept, wide = on_device(checkpoint, "keep"), on_device(checkpoint, "dequantize")
    # A full layer's `a` holds weights_proj, which no checkpoint has in FP8; the dense gate_proj ends within a block.
    assert [{name for name, m in matrices(layer).items() if m.scale is not None} for layer in kept.layers] == [
        {"b", "o", "down"},
        {"b", "o", "up", "down"},
        {"a", "b", "o", "up", "down"},
    ]
    for layer, same in zip(kept.layers, wide.layers, strict=True):
        assert torch.equal(layer.kv_b, same.kv_b)
        for name, matrix in matrices(layer).items():
            assert torch.equal(values(matrix), matrices(same)[name].weight), name


def test_bytes_of_a_step_are_those_that_are_stored() -> None:
    config = CONFIG | {"dtype": "bfloat16"}
    table = expected_tensors(spec_of(fp8(config)))
    widened = ["kv_b_proj", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"]
    widened += [f"layers.{full}.self_attn.{part}" for full in (0, 1) for part in ("q_a", "kv_a", "indexer.wk")]
    want = table["lm_head.weight"].nbytes
    for name, stored in table.items():
        if any(part in name for part in ("_proj", ".wk.", ".wq_b.")):
            wide = any(part in name for part in widened)
            want += 0 if wide and is_scale(name) else stored.nbytes * (2 if wide else 1)
    weights = shapes.random_weights(spec_of(config), "cpu", fp8=True)
    assert shapes.step_bytes(weights, KvLayout.of(weights.spec, 64), rows=0, context=0, experts=3) == want


def test_selection_in_tiles_of_different_size(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_SCORE_ROWS", 4)
    weights = on_device(checkpoint, "dequantize")
    spec = weights.spec
    pool = DevicePool(spec, 3, 16, torch.float32, "cpu")
    pool.tensor.normal_()
    chunks = prefill.Prefill(weights, pool, most_rows=6)
    lengths = torch.arange(40, 46, dtype=torch.int32)
    table = torch.tensor([2, 0, 1], dtype=torch.int32).expand(6, -1)
    for _ in range(2):
        query = torch.randn(6, spec.index_n_heads, spec.index_head_dim)
        by = torch.randn(6, spec.index_n_heads)
        selected = torch.full((6, spec.index_topk), -1, dtype=torch.int32)
        keys = rows.IndexRow(by, by, pool.keys[0], by, 1.0)
        chunks._select(query, keys, chunks._context(table, 45), lengths, 45, selected, 1)
        scores = index_scores(query[None], by[None], pool.keys[0][table[0]].flatten(0, 1)[None])[0]
        scores.masked_fill_(torch.arange(48) >= lengths[:, None], -torch.inf)
        best = select_top_k(scores, spec.index_topk)
        want = table[0][best // 16] * pool.block_rows + best % 16
        assert torch.equal(selected, want.int())
