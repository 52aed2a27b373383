"""The dtype of real checkpoints: weights and KV in bfloat16, what must be float32 in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.checkpoint.configs import random_config
from tests.engine.checkpoint.support import random_tensors, write
from tests.engine.model.support import Ours, Theirs, prompt


@pytest.fixture
def bfloat16(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    out = tmp_path / "bfloat16"
    shutil.copytree(tiny_checkpoint, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    rounded = {
        name: tensor.clone() if name.endswith("e_score_correction_bias") else tensor.bfloat16()
        for name, tensor in tensors.items()
    }
    (out / "model.safetensors").unlink()
    save_file(rounded, out / "model.safetensors")
    return out


def test_close_to_float32_and_half_the_bytes(tiny_checkpoint: Path, bfloat16: Path) -> None:
    wide, narrow = Ours(tiny_checkpoint), Ours(bfloat16)
    assert narrow.pool.layout.token_bytes * 2 == wide.pool.layout.token_bytes
    ids = prompt(32)
    expected, got = wide.all_logits(ids), narrow.all_logits(ids)
    assert got.dtype == torch.float32
    assert torch.corrcoef(torch.stack((expected.flatten(), got.flatten())))[0, 1] > 0.99
    long = prompt(90)
    chunked = narrow.prefill(long, chunk=33)
    assert torch.corrcoef(torch.stack((chunked, narrow.all_logits(long)[-1])))[0, 1] > 0.99


@pytest.mark.parametrize("seed", [3, 5])
def test_as_exact_as_the_published_code_in_bfloat16(tmp_path: Path, seed: int) -> None:
    """What rounds to bfloat16 and what stays in float32 is the same: so is the distance from float32 arithmetic."""
    config = random_config(seed) | {"dtype": "bfloat16"}
    checkpoint = write(tmp_path / "m", config, random_tensors(config, seed))
    wide, theirs, ours = Theirs(checkpoint), Theirs(checkpoint, torch.bfloat16), Ours(checkpoint)
    draws = torch.Generator().manual_seed(seed)
    # No longer than index_topk: which of two near-equal scores is taken would drown everything else.
    prompts = [torch.randint(0, 96, (config["index_topk"],), generator=draws).tolist() for _ in range(8)]
    exact = torch.cat([wide.all_logits(ids) for ids in prompts])

    def error(logits: list[torch.Tensor]) -> float:
        return float((torch.cat(logits).float() - exact).abs().median())

    mine = error([ours.all_logits(ids) for ids in prompts])
    assert 0 < mine < 1.15 * error([theirs.all_logits(ids) for ids in prompts])
