"""GLM-5.2's tensors as a GPU's kernels read them: products that share an input are one matrix, experts one stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.checkpoint.fp8 import Fp8Weight
from glm52_engine.checkpoint.loader import Weights
from glm52_engine.model.matrix import Matrix, fused, stacked


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors as the kernels read them: products that share an input are one matrix.

    a [q_lora + latent + rope (+ index_dim + index_heads), hidden]; b [heads × qk_head (+ index_heads × index_dim),
    q_lora]; up [E + 1, 2 × inner, hidden] and down [E + 1, hidden, inner], the shared expert last (dense: E = 0; where
    experts are spread over ranks, E are those of this one).
    `kv_b` [heads × (nope + v_head), latent] is never FP8: it is read by head in both directions, and a head's rows
    are no whole number of blocks.
    """

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    a: Matrix
    b: Matrix
    kv_b: torch.Tensor
    o: Matrix
    up: Matrix
    down: Matrix
    gate: torch.Tensor | None
    bias: torch.Tensor | None
    key_norm: tuple[torch.Tensor, torch.Tensor] | None


def layer_weights(
    spec: ModelSpec, index: int, tensors: Mapping[str, torch.Tensor], fp8: Mapping[str, Fp8Weight], experts: range
) -> LayerWeights:
    """Fuse a layer's checkpoint tensors, named without `model.layers.N.`; `fp8` those that were kept as stored.

    Of the routed experts `experts` are taken.
    """
    dtype = tensors["input_layernorm.weight"].dtype

    def join(*names: str) -> Matrix:
        names = tuple(f"{name}.weight" for name in names)
        return fused([fp8[name] if name in fp8 else tensors[name] for name in names], dtype)

    attention, indexer = "self_attn.", "self_attn.indexer."
    full, routed = spec.indexer_types[index] == "full", spec.is_moe(index)
    a, b = [f"{attention}q_a_proj", f"{attention}kv_a_proj_with_mqa"], [f"{attention}q_b_proj"]
    if full:
        a += [f"{indexer}wk", f"{indexer}weights_proj"]
        b += [f"{indexer}wq_b"]
    mlps = ["mlp"]
    if routed:
        mlps = [f"mlp.experts.{expert}" for expert in experts] + ["mlp.shared_experts"]
    kv_b = f"{attention}kv_b_proj.weight"
    return LayerWeights(
        input_norm=tensors["input_layernorm.weight"],
        mlp_norm=tensors["post_attention_layernorm.weight"],
        q_norm=tensors[f"{attention}q_a_layernorm.weight"],
        kv_norm=tensors[f"{attention}kv_a_layernorm.weight"],
        a=join(*a),
        b=join(*b),
        kv_b=fp8[kv_b].dequantize(dtype) if kv_b in fp8 else tensors[kv_b],
        o=join(f"{attention}o_proj"),
        up=stacked([join(f"{mlp}.gate_proj", f"{mlp}.up_proj") for mlp in mlps]),
        down=stacked([join(f"{mlp}.down_proj") for mlp in mlps]),
        gate=tensors["mlp.gate.weight"] if routed else None,
        bias=tensors["mlp.gate.e_score_correction_bias"].float() if routed else None,
        key_norm=(tensors[f"{indexer}k_norm.weight"], tensors[f"{indexer}k_norm.bias"]) if full else None,
    )


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """A model's tensors on one device, of its routed experts those numbered `experts`."""

    spec: ModelSpec
    experts: range
    embed: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    layers: tuple[LayerWeights, ...]


def device_weights(spec: ModelSpec, weights: Weights, device: str, experts: range | None = None) -> DeviceWeights:
    """Fuse and move a checkpoint's tensors, which `weights` gives away: at most one layer exists twice at a time.

    `experts`: the routed experts of this rank, where ranks share them; None: all. Others' stay where they are.
    """
    held = range(spec.n_routed_experts) if experts is None else experts
    layers = []
    for index in range(spec.num_hidden_layers):
        prefix = f"model.layers.{index}."

        def mine(name: str, prefix: str = prefix) -> bool:
            if not name.startswith(prefix):
                return False
            _, routed, rest = name.partition(".mlp.experts.")
            return not routed or int(rest.partition(".")[0]) in held

        names = [name for name in weights.tensors if mine(name)]
        tensors = {name.removeprefix(prefix): weights.tensors.pop(name).to(device) for name in names}
        kept = [name for name in weights.fp8 if mine(name)]
        fp8 = {name.removeprefix(prefix): _moved(weights.fp8.pop(name), device) for name in kept}
        layers.append(layer_weights(spec, index, tensors, fp8, held))
    return DeviceWeights(
        spec=spec,
        experts=held,
        embed=weights.tensors["model.embed_tokens.weight"].to(device),
        norm=weights.tensors["model.norm.weight"].to(device),
        head=weights.tensors["lm_head.weight"].to(device),
        layers=tuple(layers),
    )


def _moved(pair: Fp8Weight, device: str) -> Fp8Weight:
    return Fp8Weight(pair.weight.to(device), pair.scale.to(device))
