"""Checkpoints made by the tests themselves: random weights, shards, a quantiser, and files laid out byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from glm52_engine.checkpoint.config import ModelSpec, parse_model_spec
from glm52_engine.checkpoint.tensors import expected_tensors, is_fp8, scale_name
from tests.engine.checkpoint.configs import FP8

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}


def spec_of(config: Config) -> ModelSpec:
    return parse_model_spec(config, Path("config.json"))


def random_tensors(config: Config, seed: int = 0) -> Tensors:
    """Every tensor of an unquantised checkpoint, so large that the context decides attention, selection, routing."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, want in expected_tensors(spec_of(config)).items():
        value = torch.randn(want.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + value / 8
        elif name.endswith(("norm.bias", "e_score_correction_bias")):
            value = value / 4
        elif name != "model.embed_tokens.weight":
            value = value * want.shape[-1] ** -0.5 * (3 if name.endswith(("q_b_proj.weight", "lm_head.weight")) else 1)
        tensors[name] = value.bfloat16() if want.dtype == "BF16" else value
    return tensors


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn and the float32 scales of its blocks, largest magnitude 448."""
    blocks = [row.split(128, dim=1) for row in weight.float().split(128)]
    scale = torch.tensor([[float(block.abs().max()) / 448 for block in row] for row in blocks])
    rows = [
        torch.cat([block / scale[i, j] for j, block in enumerate(row)], dim=1).to(torch.float8_e4m3fn)
        for i, row in enumerate(blocks)
    ]
    return torch.cat([row.view(torch.uint8) for row in rows]).view(torch.float8_e4m3fn), scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One element at a time, in effect."""
    row = torch.arange(weight.shape[0]) // 128
    column = torch.arange(weight.shape[1]) // 128
    return (weight.float() * scale[row][:, column]).to(dtype)


def quantized(tensors: Tensors) -> Tensors:
    """What an FP8 checkpoint has in place of these tensors."""
    out = {}
    for name, tensor in tensors.items():
        if is_fp8(name):
            out[name], out[scale_name(name)] = quantize(tensor)
        else:
            out[name] = tensor
    return out


def dequantized(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """The unquantised checkpoint of the same values."""
    return {
        name: dequantize(tensor, tensors[scale_name(name)], dtype) if scale_name(name) in tensors else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }


def write(out: Path, config: Config, tensors: Tensors, *, shards: int = 1) -> Path:
    """A checkpoint directory without a tokenizer; the tensors of a layer are spread over all shards."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, out / "model.safetensors")
        return out
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, out / file)
        weight_map |= dict.fromkeys(part, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return out


def fp8(config: Config) -> Config:
    return config | {"quantization_config": FP8}


def pack(header: object, data: bytes = b"") -> bytes:
    """A file with this header, as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def lay_out(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A whole safetensors file with the tensors in the given order, aligned to nothing."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.flatten().view(torch.uint8).numpy())
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return pack(header, data)
