"""Names, shapes and dtypes of every tensor that a `ModelSpec` implies: the loader's and the maker's single list."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.checkpoint.quantization import FP8_BLOCK, FP8_LINEARS, Fp8

_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_SCALE_OF_WEIGHT = "_scale_inv"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """`dtype` in safetensors' notation (F32, BF16, F8_E4M3)."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


def scale_name(weight: str) -> str:
    """Name of the tensor with the block scales of an FP8 weight."""
    return weight + _SCALE_OF_WEIGHT


def weight_of(scale: str) -> str:
    """Name of the weight that a tensor of scales belongs to."""
    return scale.removesuffix(_SCALE_OF_WEIGHT)


def is_scale(name: str) -> bool:
    return name.endswith(".weight" + _SCALE_OF_WEIGHT)


def expert_of(name: str) -> int | None:
    """The routed expert that a tensor belongs to; None for what every rank needs."""
    match = _EXPERT.search(name)
    return int(match[1]) if match else None


def is_fp8(name: str) -> bool:
    """Whether an FP8 checkpoint stores this weight in FP8, with a tensor of scales beside it."""
    module, _, last = name.rpartition(".")
    return last == "weight" and module.rpartition(".")[2] in FP8_LINEARS


def expected_tensors(spec: ModelSpec) -> dict[str, TensorSpec]:
    """Every tensor of the model without the MTP layers, by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
        "lm_head.weight": (spec.vocab_size, spec.hidden_size),
    }
    for layer in range(spec.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        full = spec.indexer_types[layer] == "full"
        for part in (_attention(spec, full=full), _mlp(spec, moe=spec.is_moe(layer))):
            shapes.update((prefix + name, shape) for name, shape in part)
    return {tensor.name: tensor for name, shape in shapes.items() for tensor in _stored(spec, name, shape)}


def owned(expected: Mapping[str, TensorSpec], experts: range | None) -> list[str]:
    """Names without the routed experts outside `experts`; None: all."""
    return [name for name in expected if experts is None or (expert := expert_of(name)) is None or expert in experts]


def weight_bytes(spec: ModelSpec, *, fp8: Fp8 = "dequantize", experts: range | None = None) -> int:
    """Bytes of what `load_weights` returns with the same arguments."""
    expected = expected_tensors(spec)
    wide = fp8 == "dequantize"
    total = 0
    for name in owned(expected, experts):
        tensor = expected[name]
        if wide and tensor.dtype == "F8_E4M3":
            total += tensor.nbytes * _BYTES[_DTYPES[spec.dtype]]
        elif not (wide and is_scale(name)):
            total += tensor.nbytes
    return total


def mtp_names(spec: ModelSpec) -> tuple[set[str], set[str]]:
    """Names of the multi-token-prediction layers behind the last one: those they must have, those they may have.

    Each is a whole MoE layer with an indexer of its own and the parts that join it to the model; some files repeat
    the model's embedding and output layer in it, and some keep it unquantised in an FP8 checkpoint.
    """
    must: set[str] = set()
    may: set[str] = set()
    for layer in range(spec.num_hidden_layers, spec.num_hidden_layers + spec.num_nextn_predict_layers):
        prefix = f"model.layers.{layer}."
        for part in (_attention(spec, full=True), _mlp(spec, moe=True)):
            for name, _ in part:
                must.add(prefix + name)
                may.add(scale_name(prefix + name))
        must.update(prefix + name for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight"))
        must.add(prefix + "shared_head.norm.weight")
        may.update(prefix + name for name in ("embed_tokens.weight", "shared_head.head.weight"))
    return must, may


def _stored(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Iterator[TensorSpec]:
    if spec.quantization == "fp8" and is_fp8(name):
        yield TensorSpec(name, shape, "F8_E4M3")
        yield TensorSpec(scale_name(name), tuple(-(-size // FP8_BLOCK) for size in shape), "F32")
    elif name.endswith("e_score_correction_bias"):
        # float32 in every checkpoint: rounding it would move tokens between experts.
        yield TensorSpec(name, shape, "F32")
    else:
        yield TensorSpec(name, shape, _DTYPES[spec.dtype])


def _attention(spec: ModelSpec, *, full: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
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
    if full:
        yield "self_attn.indexer.wq_b.weight", (spec.index_n_heads * spec.index_head_dim, spec.q_lora_rank)
        yield "self_attn.indexer.wk.weight", (spec.index_head_dim, hidden)
        yield "self_attn.indexer.k_norm.weight", (spec.index_head_dim,)
        yield "self_attn.indexer.k_norm.bias", (spec.index_head_dim,)
        yield "self_attn.indexer.weights_proj.weight", (spec.index_n_heads, hidden)


def _mlp(spec: ModelSpec, *, moe: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not moe:
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
