"""The device's decode step and prefill against the plain model: same KV, same logits, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from glm52_engine.checkpoint import load_weights, read_model_spec
from glm52_engine.model import Span
from glm52_engine.model.device import DecodeStep, DevicePool, device_weights
from glm52_engine.model.prefill import Prefill
from tests.engine.model.support import BLOCK, Ours, prompt

LAYERS, INDEXERS = 4, ("full", "full", "full", "shared")
"""The first layers of the preset: three dense ones and a mixture of experts."""

LENGTHS = (5, 34)
"""Below and above index_topk."""


def test_prefill_and_decode_are_the_plain_model(tiny_checkpoint: Path, gpu: bool) -> None:
    if gpu:
        pytest.skip("float32 shapes of the interpreter; on a GPU bench/decode.py compares at full size")
    plain = Ours(tiny_checkpoint)
    spec = dataclasses.replace(plain.model.spec, num_hidden_layers=LAYERS, indexer_types=INDEXERS)
    del plain.model.layers[LAYERS:]
    weights = device_weights(spec, load_weights(tiny_checkpoint, read_model_spec(tiny_checkpoint)).tensors, "cpu")
    pool = DevicePool(spec, plain.pool.num_blocks, BLOCK, torch.float32, "cpu")
    step = DecodeStep(weights, pool, batch=3, longest=48, vocab_bound=300)
    prefill = Prefill(weights, pool, most_rows=64)
    step.active.fill_(2)
    for seat, length in enumerate(LENGTHS):
        ids = prompt(length, seat)
        want = plain.prefill(ids, chunk=64, seat=seat)
        step.table[seat] = plain.tables[seat, :3].int()
        table = step.table[seat].expand(length, -1)
        got = prefill.run(
            torch.tensor(ids), torch.arange(length), table, length, torch.tensor([length - 1]), together=4
        )[0]
        assert (got - want).abs().max() < 1e-3
        step.tokens[seat], step.positions[seat], step.lengths[seat] = got[:300].argmax(), length, length + 1
    tokens = step.tokens.tolist()
    before = pool.tensor.clone()
    step.run()
    want = plain.step([Span(seat, length, [tokens[seat]], True) for seat, length in enumerate(LENGTHS)])
    assert (step.logits[:2] - want).abs().max() < 1e-3
    assert step.chosen[:2].tolist() == want[:, :300].argmax(1).tolist()
    assert step.tokens[:2].tolist() == step.chosen[:2].tolist()
    assert step.positions.tolist() == [6, 35, 0], "a padding row stays where it is"
    changed = (pool.tensor != before).any(1).nonzero().flatten().tolist()
    assert changed == sorted(int(plain.tables[seat, length // BLOCK]) for seat, length in enumerate(LENGTHS))
