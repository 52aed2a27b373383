"""The checkpoints that can be made on the spot, each as the files it consists of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from glm52_engine.checkpoint.assets import (
    CHAT_TEMPLATE,
    EOS_TOKENS,
    SPECIAL_TOKENS,
    tokenizer_config,
    tokenizer_json,
)
from glm52_engine.checkpoint.random_weights import random_weights
from glm52_engine.config import ConfigError

_FIRST_SPECIAL = 256
"""Ids 0..255 are the bytes."""


def preset_files(preset: str) -> dict[str, bytes]:
    """Contents by file name, the same on every machine; raises ConfigError for an unknown preset."""
    if preset not in _CONFIGS:
        raise ConfigError(f"preset: found {preset!r}; expected one of {sorted(_CONFIGS)}")
    config = _CONFIGS[preset]
    files = {name: text.encode() for name, text in _text_files(config).items()}
    return {**files, "model.safetensors": random_weights(config)}


def _text_files(config: Mapping[str, Any]) -> dict[str, str]:
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


_CONFIGS: dict[str, dict[str, Any]] = {"tiny": _tiny_config()}
