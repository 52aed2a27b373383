"""How much host memory a load takes beside its result: one buffer, however large tensors and files are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from glm52_engine.checkpoint.loader import Fp8, Weights, load_weights
from glm52_engine.checkpoint.tensors import expected_tensors
from tests.engine.checkpoint.configs import Config, random_config
from tests.engine.checkpoint.support import fp8, pack, spec_of

MIB = 1 << 20
BUFFER = 16 * MIB
SLACK = 8 * MIB
"""What the interpreter and the allocator may add."""

BASE = random_config(1) | {"num_hidden_layers": 1, "indexer_types": ["full"], "first_k_dense_replace": 1}


def memory(field: str) -> int:
    """Bytes of a line of /proc/self/status; VmRSS is what is held now, VmHWM the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def peak_over(start: int, work: Callable[[], Weights]) -> tuple[Weights, int]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
    weights = work()
    return weights, memory("VmHWM") - start


def sparse(out: Path, config: Config) -> int:
    """A checkpoint of zeros that takes no room on disk; returns its bytes."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, tensor in expected_tensors(spec_of(config)).items():
        header[name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, offset + tensor.nbytes]
        }  # fmt: skip
        offset += tensor.nbytes
    content = pack(header)
    with (out / "model.safetensors").open("wb") as file:
        file.write(content)
        file.truncate(len(content) + offset)
    return offset


def test_streaming_to_a_device_takes_one_buffer(tmp_path: Path) -> None:
    # "meta" is a device whose memory does not exist: all that remains is what passes through the host.
    config = BASE | {"vocab_size": 400_000, "hidden_size": 48}
    size = sparse(tmp_path / "m", config)
    assert size > 8 * BUFFER
    start = memory("VmRSS")
    weights, peak = peak_over(start, lambda: load_weights(tmp_path / "m", spec_of(config), device="meta"))
    assert {tensor.device.type for tensor in weights.tensors.values()} == {"meta"}
    assert peak < BUFFER + SLACK


@pytest.mark.parametrize("mode", ["dequantize", "keep"])
def test_fp8_on_the_host_takes_its_result_and_a_buffer(tmp_path: Path, mode: Fp8) -> None:
    config = fp8(BASE | {"num_attention_heads": 1, "num_key_value_heads": 1, "kv_lora_rank": 128, "dtype": "bfloat16"})
    rows = 400_000
    config |= {"qk_nope_head_dim": rows, "qk_head_dim": rows + config["qk_rope_head_dim"]}
    size = sparse(tmp_path / "m", config)
    start = memory("VmRSS")
    weights, peak = peak_over(start, lambda: load_weights(tmp_path / "m", spec_of(config), fp8=mode))
    if mode == "keep":
        result = size  # the files' own pages, mapped
        assert all(pair.weight.dtype == torch.float8_e4m3fn for pair in weights.fp8.values())
    else:
        result = sum(tensor.nbytes for tensor in weights.tensors.values())
        assert math.isclose(result, 2 * size, rel_tol=0.01)
    assert result > 3 * BUFFER
    assert peak < result + BUFFER + SLACK
