"""What a checkpoint directory can get wrong, and that the error names file, tensor, found and expected."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm52_engine.checkpoint import load_weights, read_model_spec, weight_bytes
from glm52_engine.config import ConfigError

Tensors = dict[str, torch.Tensor]
GATE = "model.layers.3.mlp.gate.weight"
BIAS = "model.layers.3.mlp.gate.e_score_correction_bias"


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    out = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, out)
    return out


def change(checkpoint: Path, edit: Callable[[Tensors], object]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    file.unlink()
    save_file(tensors, file)


def shard(checkpoint: Path) -> dict[str, str]:
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name].clone() for name in members}, checkpoint / file)
    (checkpoint / "model.safetensors").unlink()
    weight_map = {name: file for file, members in parts.items() for name in members}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def load(checkpoint: Path) -> Tensors:
    return load_weights(checkpoint, read_model_spec(checkpoint)).tensors


def refusal(checkpoint: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load(checkpoint)
    return str(refused.value)


def test_shards_and_a_single_file_give_the_same(tiny_checkpoint: Path, copy: Path) -> None:
    whole = load_weights(tiny_checkpoint, read_model_spec(tiny_checkpoint))
    shard(copy)
    parts = load_weights(copy, read_model_spec(copy))
    assert parts.fingerprint == whole.fingerprint
    assert all(torch.equal(parts.tensors[name], tensor) for name, tensor in whole.tensors.items())
    assert parts.tensors.keys() == whole.tensors.keys()
    assert weight_bytes(copy) > 5_000_000


def test_fingerprint_sees_other_weights_of_the_same_shape(tiny_checkpoint: Path, copy: Path) -> None:
    spec = read_model_spec(copy)
    change(copy, lambda tensors: tensors[GATE].mul_(2))
    assert load_weights(copy, spec).fingerprint != load_weights(tiny_checkpoint, spec).fingerprint


def test_a_missing_tensor(copy: Path) -> None:
    change(copy, lambda tensors: tensors.pop(GATE))
    assert f"missing {GATE}" in refusal(copy)
    assert str(copy) in refusal(copy)


def test_many_missing_tensors_are_counted_not_listed(copy: Path) -> None:
    change(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.5." in name])
    assert "more (" in refusal(copy)
    assert len(refusal(copy)) < 700


def test_an_extra_tensor(copy: Path) -> None:
    # What a GLM-5 reading of a GLM-5.2 file, or the reverse, looks like.
    change(copy, lambda tensors: tensors.update({"model.layers.3.self_attn.indexer.wk.weight": torch.zeros(32, 128)}))
    assert "unknown model.layers.3.self_attn.indexer.wk.weight" in refusal(copy)


def test_a_wrong_shape(copy: Path) -> None:
    change(copy, lambda tensors: tensors.update({GATE: torch.zeros(8, 64)}))
    assert f"{copy / 'model.safetensors'}: {GATE}: found F32 [8, 64], expected F32 [8, 128]" in refusal(copy)


def test_a_wrong_dtype(copy: Path) -> None:
    change(copy, lambda tensors: tensors.update({BIAS: tensors[BIAS].bfloat16()}))
    assert f"{BIAS}: found BF16 [8], expected F32 [8]" in refusal(copy)


@pytest.mark.parametrize("keep", [0, 5, 4096, -1])
def test_a_truncated_file(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    size = len(content[:keep])
    assert refusal(copy).startswith(f"{file}: found {size} bytes, unreadable (")


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "found neither model.safetensors.index.json nor model.safetensors" in refusal(copy)


def test_a_shard_that_is_not_there(copy: Path) -> None:
    weight_map = shard(copy)
    (copy / next(iter(weight_map.values()))).unlink()
    assert refusal(copy).startswith(f"{copy / next(iter(weight_map.values()))}: found no regular file")
    with pytest.raises(ConfigError, match="cannot be read"):
        weight_bytes(copy)


def test_an_index_that_contradicts_the_files(copy: Path) -> None:
    weight_map = shard(copy)
    weight_map[GATE] = next(file for file in weight_map.values() if file != weight_map[GATE])
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert f"contradicts the files: {GATE} in " in refusal(copy)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    assert str(copy / "model.safetensors.index.json") in refusal(copy)


def test_the_mtp_layer_is_left_out_with_a_word(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    change(copy, lambda tensors: tensors.update({"model.layers.8.eh_proj.weight": torch.zeros(128, 256)}))
    with caplog.at_level(logging.INFO):
        assert not any("layers.8" in name for name in load(copy))
    assert "left out 1 tensors of the multi-token-prediction layer" in caplog.text
    change(copy, lambda tensors: tensors.update({"model.layers.9.eh_proj.weight": torch.zeros(128, 256)}))
    assert "unknown model.layers.9.eh_proj.weight" in refusal(copy)
