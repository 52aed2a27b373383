"""FP8 checkpoints: exact values in both forms, and every way in which weights and scales can fail to match."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm52_engine.checkpoint import loader
from glm52_engine.checkpoint.config import read_model_spec
from glm52_engine.checkpoint.fp8 import Fp8Weight
from glm52_engine.checkpoint.loader import load_weights
from glm52_engine.checkpoint.tensors import expected_tensors, weight_bytes
from glm52_engine.config import ConfigError
from tests.engine.checkpoint.configs import FP8_SHAPES, GLM_5_2_FP8
from tests.engine.checkpoint.support import Tensors, dequantize, fp8, quantized, random_tensors, spec_of, write

CONFIG = fp8(FP8_SHAPES)
WEIGHT = "model.layers.1.self_attn.o_proj.weight"
SCALE = WEIGHT + "_scale_inv"
KEPT = "model.layers.0.self_attn.indexer.weights_proj.weight"


@pytest.fixture(scope="module")
def stored() -> Tensors:
    return quantized(random_tensors(FP8_SHAPES))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, stored: Tensors) -> Path:
    # In three shards: a weight and its scales are in different files.
    return write(tmp_path_factory.mktemp("fp8") / "m", CONFIG, stored, shards=3)


@pytest.fixture
def copy(tmp_path: Path, stored: Tensors) -> Path:
    return write(tmp_path / "copy", CONFIG, stored)


def change(checkpoint: Path, edit: Callable[[Tensors], object]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    file.unlink()
    save_file(tensors, file)


def refusal(checkpoint: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load_weights(checkpoint, read_model_spec(checkpoint))
    return str(refused.value)


def test_the_shapes_are_no_multiples_of_a_block(stored: Tensors) -> None:
    shapes = {tuple(tensor.shape) for name, tensor in stored.items() if name + "_scale_inv" in stored}
    assert any(rows > 128 and rows % 128 for rows, _ in shapes)
    assert any(columns > 128 and columns % 128 for _, columns in shapes)
    assert any(rows < 128 for rows, _ in shapes)


@pytest.mark.parametrize("tile", [1, 16 << 20])
def test_dequantised(checkpoint: Path, stored: Tensors, monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(loader, "_TILE_BYTES", tile)
    spec = read_model_spec(checkpoint)
    weights = load_weights(checkpoint, spec)
    assert weights.fp8 == {}
    assert weights.tensors.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    for name, tensor in weights.tensors.items():
        scale = stored.get(name + "_scale_inv")
        expected = stored[name] if scale is None else dequantize(stored[name], scale, torch.bfloat16)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
    assert weight_bytes(spec) == sum(tensor.nbytes for tensor in weights.tensors.values())


def test_kept_as_stored(checkpoint: Path, stored: Tensors) -> None:
    spec = read_model_spec(checkpoint)
    weights = load_weights(checkpoint, spec, fp8="keep")
    plain = load_weights(checkpoint, spec)
    for name, pair in weights.fp8.items():
        assert torch.equal(pair.weight.view(torch.uint8), stored[name].view(torch.uint8))
        assert torch.equal(pair.scale, stored[name + "_scale_inv"])
        assert torch.equal(pair.dequantize(torch.bfloat16), plain.tensors[name])
    assert weights.fp8.keys() | weights.tensors.keys() == plain.tensors.keys()
    assert not weights.fp8.keys() & weights.tensors.keys()
    assert weights.fingerprint == plain.fingerprint
    total = sum(tensor.nbytes for tensor in weights.tensors.values())
    total += sum(pair.weight.nbytes + pair.scale.nbytes for pair in weights.fp8.values())
    assert weight_bytes(spec, fp8="keep") == total


def test_on_the_device_where_there_is_one(checkpoint: Path) -> None:
    spec = read_model_spec(checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain = load_weights(checkpoint, spec)
    there = load_weights(checkpoint, spec, device=device)
    pairs = load_weights(checkpoint, spec, device=device, fp8="keep")
    for name, tensor in plain.tensors.items():
        kept = pairs.fp8[name].dequantize(torch.bfloat16) if name in pairs.fp8 else pairs.tensors[name]
        for found in (there.tensors[name], kept):
            assert found.device.type == device.type
            assert torch.equal(found.cpu(), tensor), name


def test_the_quantiser_of_these_tests_is_one() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)) * 3
    quantised = quantized({"q_a_proj.weight": weight})
    pair = Fp8Weight(quantised["q_a_proj.weight"], quantised["q_a_proj.weight_scale_inv"])
    assert pair.scale.shape == (2, 3)
    # Three bits of mantissa: half a step of 1/8.
    assert ((pair.dequantize(torch.float32) - weight).abs() <= weight.abs() / 16 + pair.scale.max() / 512).all()


def test_which_tensors_are_fp8() -> None:
    table = expected_tensors(spec_of(GLM_5_2_FP8))
    layer = {
        name.removeprefix("model.layers.6."): (tensor.dtype, list(tensor.shape))
        for name, tensor in table.items()
        if name.startswith("model.layers.6.") and ".experts." not in name
    }
    assert layer == {
        "input_layernorm.weight": ("BF16", [6144]),
        "post_attention_layernorm.weight": ("BF16", [6144]),
        "self_attn.q_a_proj.weight": ("F8_E4M3", [2048, 6144]),
        "self_attn.q_a_proj.weight_scale_inv": ("F32", [16, 48]),
        "self_attn.q_a_layernorm.weight": ("BF16", [2048]),
        "self_attn.q_b_proj.weight": ("F8_E4M3", [16384, 2048]),
        "self_attn.q_b_proj.weight_scale_inv": ("F32", [128, 16]),
        "self_attn.kv_a_proj_with_mqa.weight": ("F8_E4M3", [576, 6144]),
        "self_attn.kv_a_proj_with_mqa.weight_scale_inv": ("F32", [5, 48]),
        "self_attn.kv_a_layernorm.weight": ("BF16", [512]),
        "self_attn.kv_b_proj.weight": ("F8_E4M3", [28672, 512]),
        "self_attn.kv_b_proj.weight_scale_inv": ("F32", [224, 4]),
        "self_attn.o_proj.weight": ("F8_E4M3", [6144, 16384]),
        "self_attn.o_proj.weight_scale_inv": ("F32", [48, 128]),
        "self_attn.indexer.wq_b.weight": ("F8_E4M3", [4096, 2048]),
        "self_attn.indexer.wq_b.weight_scale_inv": ("F32", [32, 16]),
        "self_attn.indexer.wk.weight": ("F8_E4M3", [128, 6144]),
        "self_attn.indexer.wk.weight_scale_inv": ("F32", [1, 48]),
        "self_attn.indexer.k_norm.weight": ("BF16", [128]),
        "self_attn.indexer.k_norm.bias": ("BF16", [128]),
        "self_attn.indexer.weights_proj.weight": ("BF16", [32, 6144]),
        "mlp.gate.weight": ("BF16", [256, 6144]),
        "mlp.gate.e_score_correction_bias": ("F32", [256]),
        **{
            f"mlp.shared_experts.{part}_proj.weight{suffix}": entry
            for part, shape, scales in (
                ("gate", [2048, 6144], [16, 48]),
                ("up", [2048, 6144], [16, 48]),
                ("down", [6144, 2048], [48, 16]),
            )
            for suffix, entry in (("", ("F8_E4M3", shape)), ("_scale_inv", ("F32", scales)))
        },
    }
    assert table["lm_head.weight"].dtype == table["model.embed_tokens.weight"].dtype == "BF16"
    assert table["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (48, 96)
    assert "model.layers.3.self_attn.indexer.wk.weight" not in table, "a shared layer"


def test_bytes_of_the_published_model() -> None:
    # The files hold 756 GB; the layer that is left out is 1/76 of them.
    assert math.isclose(weight_bytes(spec_of(GLM_5_2_FP8), fp8="keep"), 0.746e12, rel_tol=0.005)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(lambda t: t.pop(SCALE), f"missing {SCALE}: an FP8 weight is nothing without", id="missing scale"),
        pytest.param(lambda t: t.pop(WEIGHT), f"missing {WEIGHT}", id="scale without a weight"),
        pytest.param(
            lambda t: t.update({KEPT + "_scale_inv": torch.ones(1, 1)}),
            f"found {KEPT}_scale_inv; expected no scales",
            id="scale of what is not FP8",
        ),
        pytest.param(
            lambda t: t.update({"x.weight_scale_inv": torch.ones(1, 1)}), "unknown x.weight_scale_inv", id="stray"
        ),
        pytest.param(
            lambda t: t.update({SCALE: torch.ones(1, 1)}), f"{SCALE}: found F32 [1, 1], expected F32 [", id="shape"
        ),
        pytest.param(lambda t: t.update({SCALE: t[SCALE].bfloat16()}), f"{SCALE}: found BF16", id="scale in BF16"),
        pytest.param(lambda t: t.update({WEIGHT: t[WEIGHT].bfloat16()}), f"{WEIGHT}: found BF16", id="weight in BF16"),
        pytest.param(
            lambda t: t.update({KEPT: t[KEPT].to(torch.float8_e4m3fn)}), f"{KEPT}: found F8_E4M3", id="indexer weights"
        ),
        pytest.param(lambda t: t.update({WEIGHT: t[WEIGHT].float().to(torch.float8_e5m2)}), "F8_E5M2", id="e5m2"),
        *(
            pytest.param(
                lambda t, value=value: t[SCALE].__setitem__((1, 0), value),
                f"{SCALE}: found {value} at [1, 0]; expected finite scales",
                id=f"scale {value}",
            )
            for value in (math.inf, math.nan, -1.0)
        ),
    ],
)
def test_weights_and_scales_that_do_not_match(copy: Path, edit: Callable[[Tensors], object], message: str) -> None:
    change(copy, edit)
    assert message in refusal(copy)
    assert str(copy) in refusal(copy)


def test_the_config_must_say_so(copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps(FP8_SHAPES))
    assert "since config.json has no quantization_config" in refusal(copy)


def test_a_config_that_says_so_without_reason(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy)
    write(copy, CONFIG, random_tensors(FP8_SHAPES))
    assert "_scale_inv" in refusal(copy)
