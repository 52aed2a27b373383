"""config.json is read whole: nothing has a default, nothing may contradict."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from glm52_engine.checkpoint.config import parse_model_spec, read_model_spec
from glm52_engine.config import ConfigError

PATH = Path("/models/x/config.json")
OPTIONAL = {
    "attention_dropout", "index_skip_topk_offset", "index_topk_freq", "index_topk_pattern", "indexer_types",
    "initializer_range", "qk_head_dim", "use_cache",
}  # fmt: skip


@pytest.fixture
def raw(tiny_checkpoint: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((tiny_checkpoint / "config.json").read_text())
    return config


def test_every_architecture_field_is_required(raw: dict[str, Any]) -> None:
    for name in raw.keys() - OPTIONAL:
        without = {key: value for key, value in raw.items() if key != name}
        with pytest.raises(ConfigError, match=rf"^/models/x/config\.json: {name}: missing; expected "):
            parse_model_spec(without, PATH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"model_type": "deepseek_v32"}, "model_type: found 'deepseek_v32'; expected 'glm_moe_dsa'", id="other"
        ),
        pytest.param({"architectures": ["Glm4MoeForCausalLM"]}, "architectures: found", id="other architecture"),
        pytest.param({"rope_theta": 1e6}, "rope_theta: found 1000000.0; expected no such key", id="theta at the top"),
        pytest.param({"num_experts": 8}, "num_experts: found 8; expected no such key", id="alias"),
        pytest.param(
            {"torch_dtype": "float32"}, "torch_dtype: found 'float32'; expected no such key", id="dtype alias"
        ),
        pytest.param({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters: found", id="no rope type"),
        pytest.param({"rope_parameters": {"rope_theta": True, "rope_type": "default"}}, "rope_theta", id="theta true"),
        pytest.param(
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4}}, "rope_parameters", id="yarn"
        ),
        pytest.param({"indexer_rope_interleave": False}, "indexer_rope_interleave: found False", id="half-split"),
        pytest.param({"num_key_value_heads": 2}, "num_key_value_heads: found 2; expected 4", id="grouped"),
        pytest.param({"num_hidden_layers": True}, "num_hidden_layers: found True; expected an integer", id="bool"),
        pytest.param({"index_topk_freq": 2}, "expected the same schedule as indexer_types", id="schedules differ"),
        pytest.param({"index_topk_pattern": "FFFSSSFF"}, "expected the same schedule", id="pattern differs"),
        pytest.param({"indexer_types": ["full"] * 7}, "expected", id="short schedule"),
        pytest.param({"head_dim": 99}, "head_dim: found 99", id="head_dim"),
        pytest.param({"qk_head_dim": 99}, "qk_head_dim: found 99; expected 32", id="qk_head_dim"),
        pytest.param({"eos_token_id": 256}, "eos_token_id: found 256; expected a list", id="one eos"),
        pytest.param({"eos_token_id": [400]}, "ids below vocab_size = 320", id="eos outside"),
        pytest.param({"quantization_config": {"quant_method": "fp8"}}, "expected an unquantised", id="quantised"),
        pytest.param({"n_group": 3}, "n_group: found 3", id="groups"),
        pytest.param({"dtype": "float16"}, "dtype: found 'float16'", id="dtype"),
    ],
)
def test_contradictions_are_refused(raw: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        parse_model_spec(raw | change, PATH)
    assert str(PATH) in str(refused.value)


def test_the_three_notations_of_the_schedule_agree(raw: dict[str, Any]) -> None:
    listed = raw["indexer_types"]
    keys = ("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")
    bare = {key: value for key, value in raw.items() if key not in keys}
    for only in (
        {"indexer_types": listed},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FFFSSSFS"},
    ):
        assert parse_model_spec(bare | only, PATH).indexer_types == tuple(listed)
    # GLM-5 and 5.1 have none of the keys and an indexer in every layer.
    assert parse_model_spec(bare, PATH).indexer_types == ("full",) * 8
    # Half of a notation has no reading: other software takes 2 for an offset that GLM-5.2's file gives as 3.
    with pytest.raises(ConfigError, match="index_skip_topk_offset: missing"):
        parse_model_spec(bare | {"index_topk_freq": 4}, PATH)
    with pytest.raises(ConfigError, match="'full' for layer 0"):
        parse_model_spec(bare | {"index_topk_pattern": "SFFSSSFS"}, PATH)


def test_glm_5_2_schedule_has_21_full_layers(raw: dict[str, Any]) -> None:
    real = raw | {"num_hidden_layers": 78, "indexer_types": None}
    assert parse_model_spec(real, PATH).full_layers == (0, 1, 2, *range(6, 75, 4))


@pytest.mark.parametrize(("text", "message"), [("[]", "expected an object"), ("{", "is not JSON")])
def test_what_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_model_spec(tmp_path)
    with pytest.raises(ConfigError, match=r"absent/config\.json: cannot be read"):
        read_model_spec(tmp_path / "absent")
