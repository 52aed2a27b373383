"""config.json of the published models, and random small ones of the same architecture."""

from __future__ import annotations

import random
from typing import Any

Config = dict[str, Any]

LAYERS = 78
FULL = (0, 1, 2, *range(6, 75, 4))
"""GLM-5.2's layers with an indexer of their own: 21 of 78."""

_COMMON: Config = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}

GLM_5: Config = _COMMON | {
    "head_dim": 64,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "transformers_version": "5.0.2.dev0",
}

GLM_5_1: Config = GLM_5 | {"transformers_version": "5.4.0"}

GLM_5_2: Config = _COMMON | {
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": ["full" if layer in FULL else "shared" for layer in range(LAYERS)],
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "transformers_version": "5.12.0",
}

FP8: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

GLM_5_2_FP8: Config = GLM_5_2 | {
    "quantization_config": FP8
    | {
        "modules_to_not_convert": [
            "lm_head",
            "model.embed_tokens",
            *(f"model.layers.{layer}.self_attn.indexers_proj" for layer in range(LAYERS + 1)),
            *(f"model.layers.{layer}.mlp.gate" for layer in range(3, LAYERS + 1)),
            f"model.layers.{LAYERS}.eh_proj",
        ]
    }
}


def random_config(seed: int) -> Config:
    """A small model in float32, every size drawn: what only one of two equal sizes can do shows with unequal ones.

    The schedule of indexers is written in one of three ways: as a list, as GLM-5's files do (not at all), as numbers.
    """
    draw = random.Random(seed)
    layers = draw.randint(3, 6)
    nope, rope = draw.choice((8, 12, 24)), draw.choice((4, 8, 16))
    groups = draw.choice((1, 2, 4))
    kept = draw.randint(1, groups)
    group_size = draw.randint(2, 4)
    heads = draw.choice((1, 2, 3, 5))
    schedules: tuple[Config, ...] = (
        {"indexer_types": ["full"] + [draw.choice(("full", "shared")) for _ in range(layers - 1)]},
        {},
        {"index_topk_freq": draw.randint(2, 3), "index_skip_topk_offset": draw.randint(1, 3)},
    )
    return {**GLM_5, **schedules[seed % 3]} | {
        "dtype": "float32",
        "eos_token_id": [90, 91, 92],
        "pad_token_id": 90,
        "first_k_dense_replace": draw.randint(0, 2),
        "head_dim": rope,
        "hidden_size": draw.choice((32, 48, 80)),
        "index_head_dim": rope + draw.choice((4, 8, 16)),
        "index_n_heads": draw.choice((8, 12)),
        "index_topk": draw.choice((5, 8, 13)),
        "intermediate_size": draw.choice((24, 56)),
        "kv_lora_rank": draw.choice((16, 24, 40)),
        "max_position_embeddings": 4096,
        "moe_intermediate_size": draw.choice((12, 20)),
        "n_group": groups,
        "topk_group": kept,
        "n_routed_experts": groups * group_size,
        "num_experts_per_tok": draw.randint(1, min(4, kept * group_size)),
        "n_shared_experts": draw.choice((1, 2)),
        "norm_topk_prob": draw.random() < 0.7,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": draw.choice((20, 36)),
        "qk_head_dim": nope + rope,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "rms_norm_eps": draw.choice((1e-5, 1e-4)),
        "rope_parameters": {"rope_theta": draw.choice((10_000, 1_000_000, 8_000_000)), "rope_type": "default"},
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
        "v_head_dim": draw.choice((8, 20)),
        "vocab_size": 96,
    }


FP8_SHAPES: Config = random_config(1) | {
    "dtype": "bfloat16",
    "hidden_size": 200,
    "intermediate_size": 264,
    "moe_intermediate_size": 130,
    "q_lora_rank": 136,
}
"""Weights of one and of several blocks, most of which end within one."""
