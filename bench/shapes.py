"""The model of the GPU benchmarks: GLM-5.2's layer dimensions, fewer layers, experts and tokens, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from glm52_engine.checkpoint.config import ModelSpec, parse_model_spec
from glm52_engine.model.device import DeviceWeights, LayerWeights

LAYERS = 4


def config() -> dict[str, Any]:
    """config.json of GLM-5.2 with 4 layers (1 dense), 32 experts and a vocabulary of 32,768."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "dtype": "bfloat16",
        "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": [32000, 32001, 32002],
        "ep_size": 1, "first_k_dense_replace": 1, "head_dim": 192, "hidden_act": "silu", "hidden_size": 6144,
        "index_head_dim": 128, "index_n_heads": 32, "index_skip_topk_offset": 3, "index_topk": 2048,
        "index_topk_freq": 4, "index_topk_pattern": None, "indexer_rope_interleave": True,
        "indexer_types": ["full", "full", "full", "shared"], "initializer_range": 0.02, "intermediate_size": 12288,
        "kv_lora_rank": 512, "max_position_embeddings": 1048576, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 32, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": LAYERS, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "pad_token_id": 32000, "q_lora_rank": 2048, "qk_head_dim": 256,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "use_cache": True, "v_head_dim": 256, "vocab_size": 32768,
    }  # fmt: skip


def spec() -> ModelSpec:
    return parse_model_spec(config(), Path("bench/shapes.py"))


def random_weights(model: ModelSpec, device: str, seed: int = 52) -> DeviceWeights:
    """bfloat16, variance 1/fan-in: hidden states keep their size, and every row chooses experts of its own."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        size = shape[-1] ** -0.5
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * size

    def ones(n: int) -> torch.Tensor:
        return torch.ones(n, device=device, dtype=torch.bfloat16)

    def layer(index: int) -> LayerWeights:
        full, routed = model.indexer_types[index] == "full", model.is_moe(index)
        experts = model.n_routed_experts if routed else 0
        inner = model.moe_intermediate_size if routed else model.intermediate_size
        hidden, extra = model.hidden_size, model.index_head_dim + model.index_n_heads
        a = model.q_lora_rank + model.mla_row + (extra if full else 0)
        b = model.num_attention_heads * model.qk_head_dim + (model.index_n_heads * model.index_head_dim if full else 0)
        zeros = torch.zeros(model.index_head_dim, device=device, dtype=torch.bfloat16)
        return LayerWeights(
            input_norm=ones(hidden),
            mlp_norm=ones(hidden),
            q_norm=ones(model.q_lora_rank),
            kv_norm=ones(model.kv_lora_rank),
            a=draw(a, hidden),
            b=draw(b, model.q_lora_rank),
            kv_b=draw(model.num_attention_heads * (model.qk_nope_head_dim + model.v_head_dim), model.kv_lora_rank),
            o=draw(hidden, model.num_attention_heads * model.v_head_dim),
            up=draw(experts + 1, 2 * inner, hidden),
            down=draw(experts + 1, hidden, inner),
            gate=draw(experts, hidden) if routed else None,
            bias=torch.zeros(experts, device=device) if routed else None,
            key_norm=(ones(model.index_head_dim), zeros) if full else None,
        )

    return DeviceWeights(
        spec=model,
        embed=torch.randn(
            model.vocab_size, model.hidden_size, generator=generator, device=device, dtype=torch.bfloat16
        ),
        norm=ones(model.hidden_size),
        head=draw(model.vocab_size, model.hidden_size),
        layers=tuple(layer(index) for index in range(model.num_hidden_layers)),
    )


def transformers_model(weights: DeviceWeights) -> Any:
    """transformers' model of these shapes with our weights, in bfloat16."""
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    with torch.device("cuda"):
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**config()))
        rotary = model.model.rotary_emb
        frequencies = rotary.inv_freq.float().clone()
        model = model.to(torch.bfloat16).eval()
        # The cast takes the frequencies along: at position 2,500 their rounding is ten radians.
        rotary.inv_freq = frequencies
    _fill(model, weights)
    return model


def _fill(model: Any, weights: DeviceWeights) -> None:
    """Copy our weights into transformers' `GlmMoeDsaForCausalLM` of the same shapes."""
    spec = weights.spec
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(weights.embed)
        model.model.norm.weight.copy_(weights.norm)
        model.lm_head.weight.copy_(weights.head)
        for theirs, ours in zip(model.model.layers, weights.layers, strict=True):
            attention = theirs.self_attn
            theirs.input_layernorm.weight.copy_(ours.input_norm)
            theirs.post_attention_layernorm.weight.copy_(ours.mlp_norm)
            attention.q_a_layernorm.weight.copy_(ours.q_norm)
            attention.kv_a_layernorm.weight.copy_(ours.kv_norm)
            q_a, kv_a, *index_a = ours.a.split(
                [spec.q_lora_rank, spec.mla_row]
                + ([spec.index_head_dim, spec.index_n_heads] if ours.key_norm is not None else [])
            )
            width = spec.num_attention_heads * spec.qk_head_dim
            attention.q_a_proj.weight.copy_(q_a)
            attention.kv_a_proj_with_mqa.weight.copy_(kv_a)
            attention.q_b_proj.weight.copy_(ours.b[:width])
            attention.kv_b_proj.weight.copy_(ours.kv_b)
            attention.o_proj.weight.copy_(ours.o)
            if ours.key_norm is not None:
                indexer = attention.indexer
                indexer.wk.weight.copy_(index_a[0])
                indexer.weights_proj.weight.copy_(index_a[1])
                indexer.wq_b.weight.copy_(ours.b[width:])
                indexer.k_norm.weight.copy_(ours.key_norm[0])
                indexer.k_norm.bias.copy_(ours.key_norm[1])
            if ours.gate is None or ours.bias is None:
                _fill_mlp(theirs.mlp, ours.up[0], ours.down[0])
                continue
            theirs.mlp.gate.weight.copy_(ours.gate)
            theirs.mlp.gate.e_score_correction_bias.copy_(ours.bias)
            theirs.mlp.experts.gate_up_proj.copy_(ours.up[:-1])
            theirs.mlp.experts.down_proj.copy_(ours.down[:-1])
            _fill_mlp(theirs.mlp.shared_experts, ours.up[-1], ours.down[-1])


def _fill_mlp(theirs: Any, up: torch.Tensor, down: torch.Tensor) -> None:
    gate, raised = up.chunk(2)
    theirs.gate_proj.weight.copy_(gate)
    theirs.up_proj.weight.copy_(raised)
    theirs.down_proj.weight.copy_(down)


def step_bytes(weights: DeviceWeights, *, rows: int, context: int, experts: float) -> float:
    """Bytes that a decode step must read: every weight once, of the experts those that have rows, and the KV it uses.

    `experts`: mean number of routed experts with rows, over the MoE layers.
    """
    spec = weights.spec
    total = float(weights.head.nbytes + rows * weights.embed[0].nbytes)
    for layer in weights.layers:
        total += layer.a.nbytes + layer.b.nbytes + layer.kv_b.nbytes + layer.o.nbytes
        share = 1.0 if layer.gate is None else (experts + 1) / len(layer.up)
        total += share * (layer.up.nbytes + layer.down.nbytes)
        total += rows * min(context, spec.index_topk) * spec.mla_row * 2
        if layer.key_norm is not None and context > spec.index_topk:
            total += rows * context * spec.index_head_dim * 2
    return total
