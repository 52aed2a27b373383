"""What a checkpoint directory can get wrong, and that the error names file, tensor, found and expected."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm52_engine.checkpoint.config import read_model_spec
from glm52_engine.checkpoint.loader import Weights, load_weights, read_fingerprint
from glm52_engine.checkpoint.reader import TensorFile
from glm52_engine.checkpoint.tensors import expert_of, mtp_names, weight_bytes
from glm52_engine.config import ConfigError
from tests.engine.checkpoint.configs import GLM_5_2, random_config
from tests.engine.checkpoint.support import Tensors, lay_out, pack, random_tensors, spec_of, write

CONFIG = random_config(3) | {
    "first_k_dense_replace": 1,
    "indexer_types": None,
    "index_topk_pattern": "FSFS",
    "num_hidden_layers": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
}
GATE = "model.layers.1.mlp.gate.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    return random_tensors(CONFIG)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    return write(tmp_path_factory.mktemp("loader") / "whole", CONFIG, tensors)


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    out = tmp_path / "copy"
    shutil.copytree(whole, out)
    return out


@pytest.fixture
def sharded(tmp_path: Path, tensors: Tensors) -> Path:
    return write(tmp_path / "sharded", CONFIG, tensors, shards=3)


def change(checkpoint: Path, edit: Callable[[Tensors], object]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    file.unlink()
    save_file(tensors, file)


def load(checkpoint: Path, **options: Any) -> Weights:
    return load_weights(checkpoint, read_model_spec(checkpoint), **options)


def refusal(checkpoint: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load(checkpoint)
    return str(refused.value)


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_shards_and_a_single_file_give_the_same(whole: Path, sharded: Path, tensors: Tensors) -> None:
    one, many = load(whole), load(sharded)
    assert same(one.tensors, tensors)
    assert same(many.tensors, tensors)
    assert many.fingerprint == one.fingerprint
    assert weight_bytes(read_model_spec(whole)) == sum(tensor.nbytes for tensor in tensors.values())


def test_tensors_that_lie_across_their_alignment(copy: Path, tensors: Tensors) -> None:
    # Another writer's file: nothing says that the header's length is a multiple of anything.
    content = lay_out(tensors)
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end] + b" " * ((1 - end) % 4)
    (copy / "model.safetensors").write_bytes(pack(header, content[end:]))
    file = TensorFile(copy / "model.safetensors")
    assert any(stored.offset % 4 for stored in file.tensors.values())
    file.close()
    found = load(copy).tensors
    assert same(found, tensors)
    assert not any(tensor.data_ptr() % tensor.element_size() for tensor in found.values())


def test_fingerprint_sees_other_weights_of_the_same_shape(whole: Path, copy: Path) -> None:
    change(copy, lambda tensors: tensors[GATE].mul_(2))
    assert load(copy).fingerprint != load(whole).fingerprint


def test_fingerprint_sees_another_config_beside_the_same_weights(whole: Path, copy: Path) -> None:
    """A prefill pod that selects other tokens, or rotates by another base, writes KV that decode cannot go on from."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"index_topk": config["index_topk"] + 1}))
    assert load(copy).fingerprint != load(whole).fingerprint


def test_a_missing_tensor(copy: Path) -> None:
    change(copy, lambda tensors: tensors.pop(GATE))
    assert f"missing {GATE}" in refusal(copy)
    assert str(copy) in refusal(copy)


def test_many_missing_tensors_are_counted_not_listed(copy: Path) -> None:
    change(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name])
    assert "more (" in refusal(copy)
    assert len(refusal(copy)) < 700


def test_an_extra_tensor(copy: Path) -> None:
    # What a GLM-5 reading of a GLM-5.2 file, or the reverse, looks like.
    extra = "model.layers.1.self_attn.indexer.wk.weight"
    change(copy, lambda tensors: tensors.update({extra: torch.zeros(32, 128)}))
    assert f"unknown {extra}" in refusal(copy)


def test_a_wrong_shape(copy: Path) -> None:
    hidden = CONFIG["hidden_size"]
    change(copy, lambda tensors: tensors.update({GATE: torch.zeros(6, hidden - 1)}))
    file = copy / "model.safetensors"
    assert f"{file}: {GATE}: found F32 [6, {hidden - 1}], expected F32 [6, {hidden}]" in refusal(copy)


def test_a_wrong_dtype(copy: Path) -> None:
    change(copy, lambda tensors: tensors.update({BIAS: tensors[BIAS].bfloat16()}))
    assert f"{BIAS}: found BF16 [6], expected F32 [6]" in refusal(copy)


def test_a_truncated_file(copy: Path) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert refusal(copy).startswith(f"{file}: found {len(content) - 1} bytes, unreadable (")


def test_no_weights_at_all(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "found neither model.safetensors.index.json nor model.safetensors" in refusal(copy)


def index_of(checkpoint: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    return weight_map


def write_index(checkpoint: Path, weight_map: object) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_shard_that_is_not_there(sharded: Path) -> None:
    shard = sharded / index_of(sharded)[GATE]
    shard.unlink()
    assert refusal(sharded).startswith(f"{shard}: found no regular file")


def test_an_index_that_contradicts_the_files(sharded: Path) -> None:
    weight_map = index_of(sharded)
    other = next(file for file in weight_map.values() if file != weight_map[GATE])
    write_index(sharded, weight_map | {GATE: other})
    assert f"contradicts the files: {GATE} in {weight_map[GATE]}, not {other}" in refusal(sharded)
    write_index(sharded, {name: file for name, file in weight_map.items() if name != GATE})
    assert f"{GATE} in {weight_map[GATE]}, not listed" in refusal(sharded)


def test_a_tensor_in_two_shards(sharded: Path, tensors: Tensors) -> None:
    weight_map = index_of(sharded)
    other = next(file for file in weight_map.values() if file != weight_map[GATE])
    held = {name: tensors[name] for name, file in weight_map.items() if file == other}
    save_file(held | {GATE: tensors[GATE]}, sharded / other)
    assert f"{GATE}: found also in" in refusal(sharded)


@pytest.mark.parametrize(
    "text",
    ["{", "{}", "[1]", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}',
     '{"weight_map": {"a": "../other/model.safetensors"}}', "[" * 100_000],
)  # fmt: skip
def test_an_index_that_is_none(copy: Path, text: str) -> None:
    (copy / "model.safetensors.index.json").write_text(text)
    assert refusal(copy).startswith(str(copy / "model.safetensors.index.json"))


def test_the_mtp_layer_is_left_out_with_a_word(copy: Path, whole: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = CONFIG | {"num_nextn_predict_layers": 1}
    (copy / "config.json").write_text(json.dumps(config))
    caplog.set_level(logging.INFO)
    assert load(copy).tensors.keys() == load(whole).tensors.keys()
    assert "has no tensors of a multi-token-prediction layer" in caplog.text

    must, _ = mtp_names(spec_of(config))
    prefix = f"model.layers.{CONFIG['num_hidden_layers']}."
    change(copy, lambda tensors: tensors.update({name: torch.zeros(2) for name in must}))
    assert load(copy).tensors.keys() == load(whole).tensors.keys()
    assert f"left out {len(must)} tensors of the multi-token-prediction layer" in caplog.text
    assert {prefix + "eh_proj.weight", prefix + "self_attn.indexer.wk.weight"} <= must

    change(copy, lambda tensors: tensors.pop(prefix + "eh_proj.weight"))
    assert f"multi-token-prediction layer: missing {prefix}eh_proj.weight" in refusal(copy)
    change(copy, lambda tensors: tensors.update({name: torch.zeros(2) for name in (prefix + "eh_proj.weight", "x")}))
    assert "unknown x" in refusal(copy)
    change(copy, lambda tensors: (tensors.pop("x"), tensors.update({prefix + "draft.weight": torch.zeros(2)})))
    assert f"multi-token-prediction layer: unknown {prefix}draft.weight" in refusal(copy)


def test_a_full_size_mtp_layer_has_791_tensors() -> None:
    assert len(mtp_names(spec_of(GLM_5_2))[0]) == 791


Ranges = list[tuple[Path, int, int]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    """File, first byte and end of everything that is read from now on."""
    seen: Ranges = []
    read_into, view = TensorFile.read_into, TensorFile.view

    def recorded_read(self: TensorFile, offset: int, buffer: torch.Tensor) -> None:
        seen.append((self.path, offset, offset + len(buffer)))
        read_into(self, offset, buffer)

    def recorded_view(self: TensorFile, stored: Any) -> torch.Tensor:
        seen.append((self.path, stored.offset, stored.offset + stored.nbytes))
        return view(self, stored)

    monkeypatch.setattr(TensorFile, "read_into", recorded_read)
    monkeypatch.setattr(TensorFile, "view", recorded_view)
    return seen


def test_only_the_experts_of_a_rank_are_read(sharded: Path, whole: Path, tensors: Tensors, reads: Ranges) -> None:
    owned = range(2, 4)
    spec = read_model_spec(sharded)
    fingerprint = load(whole).fingerprint
    reads.clear()
    weights = load_weights(sharded, spec, experts=owned)
    mine = {name for name in tensors if expert_of(name) in (None, *owned)}
    others = tensors.keys() - mine
    assert same(weights.tensors, {name: tensors[name] for name in mine})
    assert weights.fingerprint == fingerprint, "every rank reports the same model"
    assert read_fingerprint(whole, read_model_spec(whole)) == fingerprint, "also one that has not loaded yet"
    assert weight_bytes(spec, experts=owned) == sum(tensors[name].nbytes for name in mine)
    assert len(others) == 4 * 3 * (spec.num_hidden_layers - 1)
    for path in sharded.glob("*.safetensors"):
        file = TensorFile(path)
        for name in others & file.tensors.keys():
            first = file.tensors[name].offset
            end = first + file.tensors[name].nbytes
            assert not any(read[0] == path and read[1] < end and first < read[2] for read in reads), name
        file.close()


def test_progress_ends_at_the_last_byte(sharded: Path, tensors: Tensors) -> None:
    seen: list[tuple[int, int]] = []
    load(sharded, on_progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert {whole for _, whole in seen} == {total}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)
