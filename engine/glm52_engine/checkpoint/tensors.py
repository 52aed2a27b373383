"""Names, shapes and dtypes of every tensor that a `ModelSpec` implies: the loader's and the maker's single list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm52_engine.checkpoint.config import ModelSpec


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """`dtype` in safetensors' notation (F32, BF16)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def expected_tensors(spec: ModelSpec) -> dict[str, TensorSpec]:
    """Every tensor of the model without the MTP layer, by name."""
    dtype = SAFETENSORS_DTYPES[spec.dtype]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
        "lm_head.weight": (spec.vocab_size, spec.hidden_size),
    }
    for layer in range(spec.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for part in (_attention(spec, layer), _mlp(spec, layer)):
            shapes.update((prefix + name, shape) for name, shape in part)
    return {
        # The correction bias is float32 in every checkpoint: rounding it would move tokens between experts.
        name: TensorSpec(name, shape, "F32" if name.endswith("e_score_correction_bias") else dtype)
        for name, shape in shapes.items()
    }


def _attention(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, hidden = spec.num_attention_heads, spec.hidden_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "self_attn.q_a_proj.weight", (spec.q_lora_rank, hidden)
    yield "self_attn.q_a_layernorm.weight", (spec.q_lora_rank,)
    yield "self_attn.q_b_proj.weight", (heads * spec.qk_head_dim, spec.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (spec.mla_row, hidden)
    yield "self_attn.kv_a_layernorm.weight", (spec.kv_lora_rank,)
    yield "self_attn.kv_b_proj.weight", (heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank)
    yield "self_attn.o_proj.weight", (hidden, heads * spec.v_head_dim)
    if spec.indexer_types[layer] == "full":
        yield "self_attn.indexer.wq_b.weight", (spec.index_n_heads * spec.index_head_dim, spec.q_lora_rank)
        yield "self_attn.indexer.wk.weight", (spec.index_head_dim, hidden)
        yield "self_attn.indexer.k_norm.weight", (spec.index_head_dim,)
        yield "self_attn.indexer.k_norm.bias", (spec.index_head_dim,)
        yield "self_attn.indexer.weights_proj.weight", (spec.index_n_heads, hidden)


def _mlp(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not spec.is_moe(layer):
        yield from _gated("mlp", spec.hidden_size, spec.intermediate_size)
        return
    yield "mlp.gate.weight", (spec.n_routed_experts, spec.hidden_size)
    yield "mlp.gate.e_score_correction_bias", (spec.n_routed_experts,)
    yield from _gated("mlp.shared_experts", spec.hidden_size, spec.moe_intermediate_size * spec.n_shared_experts)
    for expert in range(spec.n_routed_experts):
        yield from _gated(f"mlp.experts.{expert}", spec.hidden_size, spec.moe_intermediate_size)


def _gated(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)
