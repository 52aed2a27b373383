"""A start: what it refuses before it allocates anything, and that it ends with a working engine."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm52_engine.checkpoint.loader import Weights
from glm52_engine.config import ConfigError, RoleConfig
from glm52_engine.kv import KvLayout
from glm52_engine.runtime import load, progress
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.preflight import check_memory, memory_limit
from glm52_engine.sizing import GIB
from glm52_engine.tokenizer import decodable_bound, eos_token_ids
from glm52_engine.transfer.fingerprint import difference
from tests.engine.checkpoint.support import fp8, quantized, write
from tests.engine.model.support import prompt
from tests.engine.runtime.support import greedy

ROLE = RoleConfig(ranks_per_host=2, host_pool_gib=4, max_num_seqs=4)


def cgroups(root: Path, files: dict[str, str], membership: str) -> dict[str, Path]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "self").write_text(membership)
    return {"root": root, "membership": root / "self"}


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        pytest.param({"memory.max": "1000\n"}, "0::/\n", 1000, id="v2 in a container"),
        pytest.param({"memory.max": "max\n"}, "0::/\n", None, id="v2 without a limit"),
        pytest.param({"a/b/memory.max": "900", "a/memory.max": "700"}, "0::/a/b\n", 700, id="v2, a parent is smaller"),
        pytest.param(
            {"memory/memory.limit_in_bytes": "1000"}, "5:cpu:/x\n4:memory:/kubepods/x\n", 1000, id="v1 in a container"
        ),
        pytest.param({"memory/memory.limit_in_bytes": "9223372036854771712"}, "4:memory:/\n", None, id="v1 without"),
        pytest.param(
            {"memory/a/memory.limit_in_bytes": "500", "memory/memory.limit_in_bytes": "9223372036854771712"},
            "4:cpu,memory:/a\n0::/\n",
            500,
            id="v1 beside v2",
        ),
        pytest.param({}, "", None, id="none"),
    ],
)
def test_the_memory_limit(tmp_path: Path, files: dict[str, str], membership: str, expected: int | None) -> None:
    found = memory_limit(**cgroups(tmp_path, files, membership))
    assert (found[0] if found else None) == expected


def test_no_cgroup_file_system(tmp_path: Path) -> None:
    assert memory_limit(root=tmp_path / "absent", membership=tmp_path / "absent") is None


def test_too_little_memory_is_refused_with_the_sum() -> None:
    limit = (10 * GIB, Path("/sys/fs/cgroup/memory.max"))
    with pytest.raises(ConfigError) as refused:
        check_memory(ROLE, weights=GIB + 1, accelerator="cpu", limit=limit)
    assert str(refused.value) == (
        "this pod needs 12.25 GiB = 2 ranks × 4 GiB host pool + 2 GiB weights + 0.25 GiB shared memory"
        " + 2 GiB overhead, but its memory limit is 10 GiB (/sys/fs/cgroup/memory.max): "
        "raise the limit by 2.25 GiB, or lower host_pool_gib or ranks_per_host"
    )
    check_memory(ROLE, weights=GIB + 1, accelerator="cpu", limit=(13 * GIB, Path("x")))
    check_memory(ROLE, weights=GIB + 1, accelerator="cpu", limit=None)


def start(path: Path, phases: list[str] | None = None, *, pool: int = 1, max_model_len: int = 1024) -> LocalEngine:
    role = RoleConfig(ranks_per_host=1, host_pool_gib=pool, max_num_seqs=4)
    seen = [] if phases is None else phases
    return load.load_engine(path, load.Options(role, max_model_len, block_size=64), on_phase=seen.append)


def test_memory_is_checked_before_anything_is_allocated(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "memory_limit", lambda: (GIB, Path("limit")))
    phases: list[str] = []
    with pytest.raises(ConfigError, match=r"needs .* but its memory limit is 1 GiB \(limit\)"):
        start(tiny_checkpoint, phases, pool=60000)
    assert phases == ["reading the model's config", "checking the memory limit"]


def test_lengths_are_checked(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: found 200000; .*config\.json allows at most 131072"):
        start(tiny_checkpoint, max_model_len=200000)


def test_a_pool_too_small_for_one_request(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "pool_blocks", lambda *args, **kwargs: 10)
    with pytest.raises(
        ConfigError, match=r"which holds 10 blocks of 64 tokens × 2048 bytes; one request of .* needs 16"
    ):
        start(tiny_checkpoint)


def test_a_tokenizer_of_another_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "m")
    file = tmp_path / "m" / "tokenizer.json"
    file.write_text(file.read_text().replace('"id": 276', '"id": 400'))
    with pytest.raises(ConfigError, match="the tokenizer has ids up to 400, the model a vocabulary of 320"):
        start(tmp_path / "m")


def test_an_end_that_no_token_stands_for(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "m")
    file = tmp_path / "m" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [256, 300]}))
    with pytest.raises(ConfigError, match=r"eos_token_id: found \[300\]; expected ids below the tokenizer's 277"):
        start(tmp_path / "m")


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "pool_blocks", lambda *args, **kwargs: 16)


@pytest.mark.usefixtures("small_pool")
def test_what_two_engines_must_have_in_common() -> None:
    """Everything that the bytes of a block depend on, each under its name; a refusal then says both values."""
    layout = KvLayout(16, 8, (0, 1, 4), 32, 48, 32, torch.float32)
    ours = load.kv_contract(layout, Weights({}, {}, "these"))
    assert difference(ours, ours) == ""
    others = {
        "block_size": 32, "layers": 9, "full_layers": (0, 2), "latent": 16, "mla_row": 64, "index_row": 16,
        "dtype": torch.half,
    }  # fmt: skip
    assert others.keys() == {field.name for field in dataclasses.fields(KvLayout)}
    for name, value in others.items():
        theirs = load.kv_contract(dataclasses.replace(layout, **{name: value}), Weights({}, {}, "these"))
        said = difference(ours, theirs)
        assert said.startswith(f"{name}: decode has {ours[name]!r}, prefill has {theirs[name]!r}")
        assert ";" not in said
    assert "model: " in difference(ours, load.kv_contract(layout, Weights({}, {}, "those")))


async def test_each_of_the_three_ends_ends(tiny_checkpoint: Path) -> None:
    engine = start(tiny_checkpoint)
    engine.start()
    try:
        ends = eos_token_ids(tiny_checkpoint)
        assert len(ends) == 3
        for end in ends:
            request = greedy(f"r{end}", tuple(prompt(5)), 5, logit_bias=((end, 1e4),))
            token = (await engine.prefill(request)).token
            assert (token.id, token.finish) == (end, "stop")
    finally:
        engine.stop()


@pytest.mark.usefixtures("small_pool")
async def test_padding_of_the_vocabulary_is_never_sampled(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    bound = decodable_bound(tmp_path / "m")
    assert bound < len(tensors["lm_head.weight"])
    tensors["lm_head.weight"][bound:] *= -100  # the likeliest by far
    (tmp_path / "m/model.safetensors").unlink()
    save_file(tensors, tmp_path / "m/model.safetensors")
    engine = start(tmp_path / "m")
    engine.start()
    try:
        for temperature in (0.0, 5.0):
            request = greedy(f"r{temperature}", tuple(prompt(5)), 5, temperature=temperature)
            assert (await engine.prefill(request)).token.id < bound
    finally:
        engine.stop()


@pytest.mark.usefixtures("small_pool")
async def test_an_fp8_checkpoint(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m"
    shutil.copytree(tiny_checkpoint, out)
    (out / "model.safetensors").unlink()
    stored = quantized(load_file(tiny_checkpoint / "model.safetensors"))
    write(out, fp8(json.loads((out / "config.json").read_text())), stored, shards=2)
    asked: list[int] = []
    monkeypatch.setattr(load, "check_memory", lambda role, weights, accelerator, limit: asked.append(weights))
    monkeypatch.setattr(progress, "_LEAST_BYTES", 1)
    phases: list[str] = []
    engine = start(out, phases)
    # What is held, not what is stored: four bytes for each one of FP8.
    assert asked[0] > 2 * sum(tensor.nbytes for tensor in stored.values())
    told = [phase for phase in phases if phase.startswith("reading weights: ")]
    assert 15 <= len(told) <= 20
    assert told[-1] == "reading weights: 100 % of 0 GiB"
    engine.start()
    try:
        assert (await engine.prefill(greedy("r", tuple(prompt(100)), 5))).computed_tokens == 100
    finally:
        engine.stop()


async def test_a_loaded_engine_works(tiny_checkpoint: Path) -> None:
    phases: list[str] = []
    engine = start(tiny_checkpoint, phases)
    assert phases == [
        "reading the model's config",
        "checking the memory limit",
        "reading weights",
        "touching the pools",
        "first forward",
    ]
    assert engine.pools[0].num_blocks == GIB // (683 * 48 * 4), "2048 bytes a token, 682.67 MLA rows a block"
    assert engine.layout["rope"] == "interleaved"
    engine.start()
    try:
        assert (await engine.prefill(greedy("r", tuple(prompt(100)), 5))).computed_tokens == 100
    finally:
        engine.stop()
