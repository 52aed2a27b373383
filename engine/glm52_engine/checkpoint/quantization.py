"""`quantization_config` of config.json: the one scheme that GLM's FP8 checkpoints use, or none."""

from __future__ import annotations

from typing import Literal

from glm52_engine.checkpoint.fields import Fields

Quantization = Literal["fp8"]

Fp8 = Literal["dequantize", "keep"]
"""What becomes of FP8 weights: values in the model's dtype, or the stored pair of weight and scales."""

FP8_BLOCK = 128
"""Rows and columns of the blocks that share a scale."""

FP8_LINEARS = frozenset(
    {
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),  # attention
        *("wq_b", "wk"),  # indexer; its weights_proj is not among them
        *("gate_proj", "up_proj", "down_proj"),  # dense, shared and routed feed-forward
    }
)
"""Last names of the modules whose weights an FP8 checkpoint stores in FP8; every other tensor keeps its precision."""

_HOLDS_LINEARS = frozenset(
    {"", "self_attn", "self_attn.indexer", "mlp", "mlp.experts", "mlp.experts.*", "mlp.shared_experts"}
)
"""Modules inside a layer that contain such linears."""

_FIXED: dict[str, object] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}


def parse_quantization(fields: Fields, layers: int) -> Quantization | None:
    """`fields` is the whole config.json, `layers` its num_hidden_layers; raises ConfigError."""
    if fields.raw.get("quantization_config") is None:
        return None
    quantization = fields.nested("quantization_config", "an object")
    for name, value in _FIXED.items():
        quantization.exactly(name, value)
    kept = quantization.raw.get("modules_to_not_convert")
    if kept is not None and not (isinstance(kept, list) and all(isinstance(name, str) for name in kept)):
        quantization.refuse("modules_to_not_convert", kept, "a list of module names")
    for name in kept or ():
        if _converted(name, layers):
            quantization.refuse(
                "modules_to_not_convert", name, "only modules that GLM's FP8 checkpoints keep in full precision"
            )
    for name in quantization.raw.keys() - _FIXED.keys() - {"modules_to_not_convert"}:
        quantization.refuse(name, quantization.raw[name], "no such key")
    return "fp8"


def _converted(module: str, layers: int) -> bool:
    """Whether a name of `modules_to_not_convert` covers a weight that we read as FP8.

    The list only confirms what the tensors must be: names that no tensor has (`indexers_proj` in published files) and
    those of the multi-token-prediction layer do not matter.
    """
    parts = module.split(".")
    if parts[0] == "model":
        parts = parts[1:]
    if parts and parts[0] == "layers":
        parts = parts[1:]
        if parts and parts[0].isdecimal():
            if int(parts[0]) >= layers:
                return False
            parts = parts[1:]
    if parts[-1:] and parts[-1] in FP8_LINEARS:
        return True
    return ".".join("*" if part.isdecimal() else part for part in parts) in _HOLDS_LINEARS
