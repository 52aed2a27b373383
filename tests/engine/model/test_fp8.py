"""An FP8 checkpoint gives exactly what the unquantised checkpoint of the same values gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.configs import FP8_SHAPES
from tests.engine.checkpoint.support import dequantized, fp8, quantized, random_tensors, write
from tests.engine.model.support import Ours


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_output(tmp_path: Path, dtype: str) -> None:
    config = FP8_SHAPES | {"dtype": dtype}
    original = random_tensors(config)
    stored = quantized(original)
    same = dequantized(stored, getattr(torch, dtype))
    ids = torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    from_fp8 = Ours(write(tmp_path / "fp8", fp8(config), stored, shards=2))
    from_same = Ours(write(tmp_path / "same", config, same))
    assert torch.equal(from_fp8.all_logits(ids), from_same.all_logits(ids))
    assert from_fp8.greedy(ids, 10, chunk=7) == from_same.greedy(ids, 10, chunk=7)
    # And quantising does change something.
    unquantised = Ours(write(tmp_path / "original", config, original)).all_logits(ids)
    assert not torch.equal(from_same.all_logits(ids), unquantised)
