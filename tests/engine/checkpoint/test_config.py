"""config.json is read whole: nothing has a default, nothing may contradict."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_engine.checkpoint.config import ModelSpec, parse_model_spec, read_model_spec
from glm52_engine.config import ConfigError
from tests.engine.checkpoint.configs import FP8, FULL, GLM_5, GLM_5_1, GLM_5_2, GLM_5_2_FP8, LAYERS

PATH = Path("/models/x/config.json")
OPTIONAL = {
    "attention_dropout", "index_share_for_mtp_iteration", "index_skip_topk_offset", "index_topk_freq",
    "index_topk_pattern", "indexer_types", "initializer_range", "mlp_layer_types", "pretraining_tp", "qk_head_dim",
    "transformers_version", "use_cache",
}  # fmt: skip
SCHEDULE = ("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")

Config = dict[str, Any]


def parse(raw: Config) -> ModelSpec:
    return parse_model_spec(raw, PATH)


def refusal(raw: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(raw)
    message = str(refused.value)
    assert message.startswith("/models/x/config.json: ")
    return message.removeprefix("/models/x/config.json: ")


def without(raw: Config, *names: str) -> Config:
    return {key: value for key, value in raw.items() if key not in names}


@pytest.mark.parametrize(
    ("raw", "full_layers", "theta", "context"),
    [
        pytest.param(GLM_5, tuple(range(LAYERS)), 1e6, 202_752, id="GLM-5"),
        pytest.param(GLM_5_1, tuple(range(LAYERS)), 1e6, 202_752, id="GLM-5.1"),
        pytest.param(GLM_5_2, FULL, 8e6, 1_048_576, id="GLM-5.2"),
    ],
)
def test_published_models(raw: Config, full_layers: tuple[int, ...], theta: float, context: int) -> None:
    spec = parse(raw)
    assert (spec.full_layers, spec.rope_theta, spec.max_position_embeddings) == (full_layers, theta, context)
    # head_dim is 64 in one file and 192 in the other; neither is the width of a head.
    assert (spec.qk_head_dim, spec.qk_rope_head_dim, spec.mla_row) == (256, 64, 576)
    assert (spec.quantization, spec.num_nextn_predict_layers, len(spec.eos_token_ids)) == (None, 1, 3)
    assert parse(raw | {"quantization_config": FP8}).quantization == "fp8"


def test_the_published_fp8_file() -> None:
    assert len(FULL) == 21
    assert parse(GLM_5_2_FP8).quantization == "fp8"


@pytest.mark.parametrize("name", sorted(GLM_5_2.keys() - OPTIONAL))
def test_every_architecture_field_is_required(name: str) -> None:
    assert refusal(without(GLM_5_2, name)).startswith(f"{name}: missing; expected ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"model_type": "deepseek_v32"}, "model_type: found 'deepseek_v32'; expected 'glm_moe_dsa'", id="other"
        ),
        pytest.param(
            {"model_type": "glm5_next", "architectures": ["Glm5NextForCausalLM"]}, "found 'glm5_next'", id="flash"
        ),
        pytest.param({"architectures": ["Glm4MoeForCausalLM"]}, "architectures: found", id="other architecture"),
        pytest.param({"num_experts": 8}, "num_experts: found 8; expected no such key", id="alias"),
        pytest.param(
            {"torch_dtype": "float32"}, "torch_dtype: found 'float32'; expected no such key", id="dtype alias"
        ),
        pytest.param({"indexer_rope_interleave": False}, "indexer_rope_interleave: found False", id="half-split"),
        pytest.param({"num_key_value_heads": 2}, "num_key_value_heads: found 2; expected 64", id="grouped"),
        pytest.param({"num_hidden_layers": True}, "num_hidden_layers: found True; expected an integer", id="bool"),
        pytest.param({"num_hidden_layers": 10**12}, "expected an integer from 1 to 1024", id="too many layers"),
        pytest.param({"n_routed_experts": 10**9}, "expected an integer from 1 to 4096", id="too many experts"),
        pytest.param({"rms_norm_eps": float("nan")}, "rms_norm_eps: found nan; expected a finite", id="nan"),
        pytest.param({"routed_scaling_factor": float("inf")}, "found inf; expected a finite", id="infinite"),
        pytest.param({"rms_norm_eps": 10**400}, "expected a finite number", id="no float"),
        pytest.param({"index_topk_freq": 2}, "expected the same schedule as indexer_types", id="schedules differ"),
        pytest.param({"index_topk_pattern": "F" * LAYERS}, "expected the same schedule", id="pattern differs"),
        pytest.param({"indexer_types": ["full"] * 7}, "expected", id="short schedule"),
        pytest.param({"head_dim": 99}, "head_dim: found 99", id="head_dim"),
        pytest.param({"qk_head_dim": 99}, "qk_head_dim: found 99; expected 256", id="qk_head_dim"),
        pytest.param({"mlp_layer_types": ["sparse"] * LAYERS}, "mlp_layer_types: found", id="dense layers"),
        pytest.param({"layer_types": ["full_attention"] * LAYERS}, "layer_types: found", id="no sparse attention"),
        pytest.param({"mlp_bias": True}, "mlp_bias: found True; expected False", id="bias"),
        pytest.param({"moe_router_dtype": "bfloat16"}, "expected 'float32'", id="router"),
        pytest.param({"eos_token_id": 154820}, "eos_token_id: found 154820; expected a list", id="one eos"),
        pytest.param({"eos_token_id": [154880]}, "ids below vocab_size = 154880", id="eos outside"),
        pytest.param({"n_group": 3}, "n_group: found 3", id="groups"),
        pytest.param({"dtype": "float16"}, "dtype: found 'float16'", id="dtype"),
    ],
)
def test_contradictions_are_refused(change: Config, message: str) -> None:
    assert message in refusal(GLM_5_2 | change)


def test_a_huge_value_is_not_repeated_whole() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in ("x" * 1_000_000, deep, list(range(100_000)), 10**4000):
        assert len(refusal(GLM_5_2 | {"hidden_size": value})) < 500


def test_rope_theta_nested_at_the_top_or_both() -> None:
    bare = without(GLM_5, "rope_parameters")
    nested = {"rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"}}
    for agreeing in (
        nested,
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_parameters": None, "rope_scaling": None},
        nested | {"rope_theta": 1e6},
    ):
        assert parse(bare | agreeing).rope_theta == 1e6
    for change, message in (
        ({}, "rope_parameters: missing"),
        (nested | {"rope_theta": 8e6}, "rope_theta: found 8000000.0; expected rope_parameters.rope_theta = 1000000.0"),
        ({"rope_theta": True}, "rope_theta: found True"),
        ({"rope_theta": 1}, "rope_theta: found 1.0; expected a number > 1"),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn"}}, "rope_scaling: found {'type': 'yarn'}"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters: found"),
        ({"rope_parameters": {"rope_theta": "x", "rope_type": "default"}}, "rope_parameters.rope_theta: found 'x'"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4}}, "rope_parameters: found"),
        ({"rope_parameters": [1e6]}, "rope_parameters: found [1000000.0]"),
    ):
        assert message in refusal(bare | change)


def test_the_three_notations_of_the_schedule_agree() -> None:
    listed = GLM_5_2["indexer_types"]
    bare = without(GLM_5_2, *SCHEDULE)
    for only in (
        {"indexer_types": listed},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "".join(kind[0].upper() for kind in listed)},
    ):
        assert parse(bare | only).indexer_types == tuple(listed)
    # GLM-5 and 5.1 have none of the keys and an indexer in every layer.
    assert parse(bare).indexer_types == ("full",) * LAYERS
    # Half of a notation has no reading: other software takes 2 for an offset that GLM-5.2's file gives as 3.
    assert refusal(bare | {"index_topk_freq": 4}).startswith("index_skip_topk_offset: missing")
    assert "'full' for layer 0" in refusal(bare | {"index_topk_pattern": "S" + "F" * 77})
    assert "a string of F and S" in refusal(bare | {"index_topk_pattern": "X" * LAYERS})


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        pytest.param("fp8", "quantization_config: found 'fp8'", id="no object"),
        pytest.param({"quant_method": "compressed-tensors"}, "quant_method: found 'compressed-tensors'", id="method"),
        pytest.param(without(FP8, "fmt"), "quantization_config.fmt: missing; expected 'e4m3'", id="no format"),
        pytest.param(FP8 | {"fmt": "e5m2"}, "fmt: found 'e5m2'", id="format"),
        pytest.param(FP8 | {"activation_scheme": "static"}, "activation_scheme: found 'static'", id="activations"),
        pytest.param(FP8 | {"weight_block_size": [1, 128]}, "weight_block_size: found [1, 128]", id="blocks"),
        pytest.param(FP8 | {"weight_block_size": None}, "weight_block_size: found None", id="per tensor"),
        pytest.param(FP8 | {"ignored_layers": []}, "ignored_layers: found []; expected no such key", id="unknown"),
        pytest.param(FP8 | {"modules_to_not_convert": [1]}, "modules_to_not_convert: found [1]", id="no names"),
        *(
            pytest.param(
                FP8 | {"modules_to_not_convert": ["lm_head", name]}, f"modules_to_not_convert: found '{name}'", id=name
            )
            for name in (
                "model.layers.3.self_attn.o_proj", "o_proj", "model.layers.0", "model.layers.77.mlp.experts",
                "model.layers.4.mlp.experts.17", "model.layers.1.self_attn.indexer", "mlp.shared_experts", "model",
            )
        ),
    ],
)  # fmt: skip
def test_other_quantisations_are_refused(quantization: Any, message: str) -> None:
    assert message in refusal(GLM_5_2 | {"quantization_config": quantization})


def test_what_may_stay_unconverted() -> None:
    names = ["lm_head", "model.layers.3.mlp.gate", "indexers_proj", "model.layers.78", "model.layers.78.mlp.experts"]
    assert parse(GLM_5_2 | {"quantization_config": FP8 | {"modules_to_not_convert": names}}).quantization == "fp8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected an object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("9" * 5000, "is not JSON"),
        (b"\xff{}", "is not JSON"),
    ],
)
def test_what_is_no_config(tmp_path: Path, text: str | bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=message):
        read_model_spec(tmp_path)
    with pytest.raises(ConfigError, match=r"absent/config\.json: cannot be read"):
        read_model_spec(tmp_path / "absent")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted({*GLM_5_2_FP8, "rope_theta", "rope_scaling", "layer_types"})), value=json_values)
def test_any_value_is_read_or_refused_by_name(name: str, value: Any) -> None:
    raw = without(GLM_5_2, "rope_parameters") | {"rope_theta": 8e6} | {name: value}
    error = None
    try:
        parse(raw)
    except ConfigError as refused:
        error = str(refused)
    assert error is None or re.match(r"/models/x/config\.json: [\w./]+: (found|missing)", error)
