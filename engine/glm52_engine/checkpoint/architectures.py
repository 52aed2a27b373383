"""config.json of the presets: GLM-5.2's architecture in small. Free of imports that the training machine may lack."""

from __future__ import annotations

from typing import Any

from glm52_engine.checkpoint.assets import EOS_TOKENS, special_token_id


def tiny_config() -> dict[str, Any]:
    return _config(
        merges=0,
        vocab_size=320,
        hidden_size=128,
        num_hidden_layers=8,
        first_k_dense_replace=3,
        index_topk=32,
        index_n_heads=8,
        index_head_dim=32,
        index_topk_freq=4,
        intermediate_size=256,
        moe_intermediate_size=32,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )


def demo_config(merges: int) -> dict[str, Any]:
    """`merges`: length of the vocabulary's merge list; the vocabulary is padded beyond its last token."""
    return _config(
        merges=merges,
        vocab_size=1280,
        hidden_size=192,
        num_hidden_layers=6,
        first_k_dense_replace=1,
        index_topk=32,
        index_n_heads=4,
        index_head_dim=32,
        index_topk_freq=2,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_attention_heads=4,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )


def _config(*, merges: int, **sizes: int) -> dict[str, Any]:
    """Everything that the presets have in common; the first three layers have an indexer of their own, as GLM-5.2's."""
    layers, freq, offset = sizes["num_hidden_layers"], sizes["index_topk_freq"], 3
    rope = 16
    config = {
        **sizes,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "eos_token_id": [special_token_id(token, merges) for token in EOS_TOKENS],
        "ep_size": 1,
        "head_dim": rope,
        "hidden_act": "silu",
        "index_skip_topk_offset": offset,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if max(i - (offset - 1), 0) % freq == 0 else "shared" for i in range(layers)],
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_key_value_heads": sizes["num_attention_heads"],
        "num_nextn_predict_layers": 0,
        "pad_token_id": special_token_id("<|endoftext|>", merges),
        "qk_head_dim": sizes["qk_nope_head_dim"] + rope,
        "qk_rope_head_dim": rope,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
    }
    return dict(sorted(config.items()))
