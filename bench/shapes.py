"""The model of the GPU benchmarks: GLM-5.2's layer dimensions, fewer layers, experts and tokens, random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from glm52_engine.checkpoint.config import ModelSpec, parse_model_spec
from glm52_engine.checkpoint.fp8 import Fp8Weight
from glm52_engine.checkpoint.loader import Weights
from glm52_engine.checkpoint.quantization import FP8_BLOCK
from glm52_engine.checkpoint.tensors import expected_tensors, is_fp8
from glm52_engine.kv import KvLayout
from glm52_engine.model.device_weights import DeviceWeights, device_weights
from glm52_engine.model.matrix import Matrix

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


def random_weights(model: ModelSpec, device: str, seed: int = 52, *, fp8: bool = False) -> DeviceWeights:
    """`random_tensors`, fused for a GPU."""
    return device_weights(model, random_tensors(model, device, seed, fp8=fp8), device)


def random_tensors(model: ModelSpec, device: str, seed: int = 52, *, fp8: bool = False) -> Weights:
    """bfloat16, variance 1/fan-in: hidden states keep their size, and every row chooses experts of its own.

    `fp8`: what a checkpoint in FP8 stores so is FP8, with the same values but for their rounding.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=device, dtype=torch.bfloat16)
        if name.endswith("norm.bias"):
            return torch.zeros(shape, device=device, dtype=torch.bfloat16)
        if name.endswith("e_score_correction_bias"):
            return torch.zeros(shape, device=device)
        size = 1.0 if name == "model.embed_tokens.weight" else shape[-1] ** -0.5
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * size

    weights = Weights({}, {}, "")
    for name, want in expected_tensors(model).items():
        tensor = draw(name, want.shape)
        if fp8 and is_fp8(name):
            weights.fp8[name] = quantized(tensor)
        else:
            weights.tensors[name] = tensor
    return weights


def quantized(weight: torch.Tensor) -> Fp8Weight:
    """Each block's scale makes its largest magnitude e4m3's largest; weight [N, K], no block all zero."""
    n, k = weight.shape
    padded = F.pad(weight.float(), (0, -k % FP8_BLOCK, 0, -n % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    scaled = (blocks / scale[:, None, :, None]).view_as(padded)[:n, :k]
    return Fp8Weight(scaled.to(torch.float8_e4m3fn).contiguous(), scale)


def values(matrix: Matrix) -> torch.Tensor:
    """A matrix, or a stack of them, in bfloat16."""
    if matrix.scale is None:
        return matrix.weight
    if matrix.weight.dim() == 2:
        return Fp8Weight(matrix.weight, matrix.scale).dequantize(torch.bfloat16)
    return torch.stack([values(Matrix(*pair)) for pair in zip(matrix.weight, matrix.scale, strict=True)])


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
            q_a, kv_a, *index_a = values(ours.a).split(
                [spec.q_lora_rank, spec.mla_row]
                + ([spec.index_head_dim, spec.index_n_heads] if ours.key_norm is not None else [])
            )
            width = spec.num_attention_heads * spec.qk_head_dim
            attention.q_a_proj.weight.copy_(q_a)
            attention.kv_a_proj_with_mqa.weight.copy_(kv_a)
            b = values(ours.b)
            attention.q_b_proj.weight.copy_(b[:width])
            attention.kv_b_proj.weight.copy_(ours.kv_b)
            attention.o_proj.weight.copy_(values(ours.o))
            if ours.key_norm is not None:
                indexer = attention.indexer
                indexer.wk.weight.copy_(index_a[0])
                indexer.weights_proj.weight.copy_(index_a[1])
                indexer.wq_b.weight.copy_(b[width:])
                indexer.k_norm.weight.copy_(ours.key_norm[0])
                indexer.k_norm.bias.copy_(ours.key_norm[1])
            up, down = values(ours.up), values(ours.down)
            if ours.gate is None or ours.bias is None:
                _fill_mlp(theirs.mlp, up[0], down[0])
                continue
            theirs.mlp.gate.weight.copy_(ours.gate)
            theirs.mlp.gate.e_score_correction_bias.copy_(ours.bias)
            theirs.mlp.experts.gate_up_proj.copy_(up[:-1])
            theirs.mlp.experts.down_proj.copy_(down[:-1])
            _fill_mlp(theirs.mlp.shared_experts, up[-1], down[-1])


def _fill_mlp(theirs: Any, up: torch.Tensor, down: torch.Tensor) -> None:
    gate, raised = up.chunk(2)
    theirs.gate_proj.weight.copy_(gate)
    theirs.up_proj.weight.copy_(raised)
    theirs.down_proj.weight.copy_(down)


def step_bytes(weights: DeviceWeights, layout: KvLayout, *, rows: int, context: int, experts: float) -> float:
    """Bytes that a decode step must read: every weight once, of the experts those that have rows, and the KV it uses.

    Weights count as they are stored: in FP8 with their scales, and in bfloat16 where `device_weights` widened them.
    `experts`: mean number of routed experts with rows, over the MoE layers.
    """
    spec = weights.spec
    total = float(weights.head.nbytes + rows * weights.embed[0].nbytes)
    for layer in weights.layers:
        total += layer.a.nbytes + layer.b.nbytes + layer.kv_b.nbytes + layer.o.nbytes
        share = 1.0 if layer.gate is None else (experts + 1) / len(layer.up.weight)
        total += share * (layer.up.nbytes + layer.down.nbytes)
        total += rows * min(context, spec.index_topk) * layout.mla_row_bytes
        if layer.key_norm is not None and context > spec.index_topk:
            total += rows * context * layout.index_row_bytes
    return total
