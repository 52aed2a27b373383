"""Small checkpoints of the GLM-5.2 architecture with random weights: the `tiny` preset of examples, tests and CI.

The same bytes on every machine: weights are sums of uniform integers times one factor, so no vectorised
transcendental function, which may differ in the last bit between processors, takes part.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from glm52_engine.checkpoint.assets import (
    CHAT_TEMPLATE,
    EOS_TOKENS,
    SPECIAL_TOKENS,
    tokenizer_config,
    tokenizer_json,
)
from glm52_engine.checkpoint.config import ModelSpec, parse_model_spec
from glm52_engine.checkpoint.tensors import expected_tensors
from glm52_engine.config import ConfigError

_SEED = 5_2
_FIRST_SPECIAL = 256
"""Ids 0..255 are the bytes."""

_CONSTANT = 8.0
"""Value of the hidden channel 0, which no layer writes: through it the output layer has a bias per token."""

_OUTPUT_SCALE = 4.0
"""Standard deviation of a logit around its bias: near-ties of the best two are then far above float32 noise."""

_GAIN = 1.5
"""What a sub-layer adds, against what is there: below 1 the last token alone decides, and greedy output loops."""

_READS_HIDDEN = tuple(
    f"{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa", "wk", "gate", "gate_proj", "up_proj")
)
"""Layers do not read the constant channel: it would make all queries and keys alike."""

_SHARPNESS = 2.0
"""Of the attention: it follows single tokens, so that a wrong one among the selected changes the output."""


def make_checkpoint(preset: str, out: Path) -> None:
    """Write a checkpoint to the directory `out`, atomically; does nothing when `out` already holds this preset whole.

    Raises ConfigError for an unknown preset, or when `out` holds something else.
    """
    if preset not in _PRESETS:
        raise ConfigError(f"preset: found {preset!r}; expected one of {sorted(_PRESETS)}")
    config = _PRESETS[preset]
    text_files = _text_files(config)
    names = {*text_files, "model.safetensors"}
    if _holds(out, names, text_files["config.json"]):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for name, text in text_files.items():
            (staging / name).write_text(text)
        spec = parse_model_spec(config, staging / "config.json")
        save_file(_weights(spec), staging / "model.safetensors", metadata={"format": "pt"})
        for file in staging.iterdir():
            _sync(file)
            file.chmod(0o644)
        staging.chmod(0o755)
        # A reader sees either no checkpoint or all of it, also when two makers race or the node dies in between.
        _replace_directory(staging, out, names)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _holds(out: Path, names: set[str], config: str) -> bool:
    """Whether `out` is whole; False when it is absent, empty or half of this preset (a maker that was killed)."""
    if not out.is_dir():
        return False
    found = {file.name for file in out.iterdir()}
    foreign = found - names - {_part(name) for name in names}
    if foreign or ("config.json" in found and (out / "config.json").read_text() != config):
        raise ConfigError(
            f"{out}: found {sorted(foreign) or 'another config.json'}; expected an empty or absent directory"
        )
    return names <= found


def _part(name: str) -> str:
    return f".{name}.part"


def _replace_directory(staging: Path, out: Path, names: set[str]) -> None:
    try:
        os.rename(staging, out)
    except OSError:
        # `out` has files: half a preset, another maker was first, or it is a mount point that cannot be renamed onto.
        if not out.is_dir():
            raise
        for name in sorted(names):
            shutil.copyfile(staging / name, out / _part(name))
            os.rename(out / _part(name), out / name)


def _sync(file: Path) -> None:
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())


def _text_files(config: dict[str, Any]) -> dict[str, str]:
    generation = {
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    return {
        "config.json": _dump(config),
        "generation_config.json": _dump(generation),
        "tokenizer.json": _dump(tokenizer_json()),
        "tokenizer_config.json": _dump(tokenizer_config(config["max_position_embeddings"])),
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def _dump(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _special(token: str) -> int:
    return _FIRST_SPECIAL + SPECIAL_TOKENS.index(token)


def _tiny_config() -> dict[str, Any]:
    layers = 8
    freq, offset = 4, 3
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "eos_token_id": [_special(token) for token in EOS_TOKENS],
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 128,
        "index_head_dim": 32,
        "index_n_heads": 8,
        "index_skip_topk_offset": offset,
        "index_topk": 32,
        "index_topk_freq": freq,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if max(i - (offset - 1), 0) % freq == 0 else "shared" for i in range(layers)],
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "kv_lora_rank": 32,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "pad_token_id": _special("<|endoftext|>"),
        "q_lora_rank": 64,
        "qk_head_dim": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": 16,
        "vocab_size": 320,
    }


_PRESETS: dict[str, dict[str, Any]] = {"tiny": _tiny_config()}


def _weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Random tensors in name order from one generator; float32, then rounded to the checkpoint's dtype."""
    generator = torch.Generator().manual_seed(_SEED)
    tensors = {}
    for name, want in sorted(expected_tensors(spec).items()):
        tensor = _bell(want.shape, generator)
        tensor = _shape_tensor(name, tensor)
        dtype = torch.float32 if want.dtype == "F32" else torch.bfloat16
        tensors[name] = tensor.to(dtype).contiguous()
    return tensors


def _bell(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Mean 0, variance 1, nearly normal: the sum of four uniform integers, exact in float32."""
    draws = torch.randint(0, 256, (4, *shape), generator=generator, dtype=torch.int64).sum(0)
    return (draws - 510).to(torch.float32) * (1 / 148)


def _shape_tensor(name: str, bell: torch.Tensor) -> torch.Tensor:
    """Scale of each kind of tensor, chosen so that context decides the next token and near-ties are rare."""
    if name.endswith("norm.weight"):
        return 1 + bell * 0.125
    if name.endswith("norm.bias"):
        return bell * 0.125
    if name.endswith("e_score_correction_bias"):
        return bell * 0.25
    if name == "model.embed_tokens.weight":
        bell[:, 0] = _CONSTANT
        return bell
    if name == "lm_head.weight":
        return _lm_head(bell)
    scaled: torch.Tensor = bell * bell.shape[-1] ** -0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        scaled *= _GAIN
        scaled[0] = 0
    elif name.endswith(("q_b_proj.weight", "kv_b_proj.weight")):
        scaled *= _SHARPNESS
    elif name.endswith("weights_proj.weight"):
        # Positive weights: else whole contexts score exactly 0 and only the tie-break decides.
        scaled[:, 0] = 1.0
    elif name.endswith(_READS_HIDDEN):
        scaled[:, 0] = 0
    return scaled


def _lm_head(bell: torch.Tensor) -> torch.Tensor:
    """Prefers lower-case letters and blanks to other printable bytes, those to the rest, and special tokens to none."""
    bias = torch.full((bell.shape[0],), -50.0)
    bias[:_FIRST_SPECIAL] = -15.0
    bias[0x20:0x7F] = 0.0
    bias[ord("a") : ord("z") + 1] = 9.0
    bias[ord(" ")] = 10.0
    scaled: torch.Tensor = bell * (_OUTPUT_SCALE * bell.shape[-1] ** -0.5)
    scaled[:, 0] = bias
    return scaled
