"""The slab: views that cover a block exactly once, and blocks that carry everything with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from glm52_engine.checkpoint import read_model_spec
from glm52_engine.config import ConfigError
from glm52_engine.kv import KvLayout, Pool


@pytest.fixture
def layout(tiny_checkpoint: Path) -> KvLayout:
    return KvLayout.of(read_model_spec(tiny_checkpoint), 4)


def views(pool: Pool) -> list[Any]:
    return [*pool.mla, *pool.index.values()]


def test_bytes_per_token(layout: KvLayout) -> None:
    assert layout.token_bytes == (8 * (32 + 16) + 4 * 32) * 4
    assert layout.block_rows == 43, "42.67 MLA rows"
    assert layout.block_bytes == 43 * 48 * 4


def test_views_cover_every_byte_once(layout: KvLayout) -> None:
    pool = Pool(layout, 3)
    pool.touch()
    for view in views(pool):
        view += 1
    used = 4 * layout.token_bytes
    assert (pool.tensor[:, :used].contiguous().view(torch.float32) == 1).all()
    assert (pool.tensor[:, used:] == 0).all()
    assert sorted(pool.index) == list(layout.full_layers)
    assert pool.tensor.is_contiguous()
    assert pool.tensor.shape == (3, pool.block_bytes)


def test_bytes_per_token_in_fp8(tiny_checkpoint: Path) -> None:
    layout = KvLayout.of(read_model_spec(tiny_checkpoint), 4, "fp8")
    assert layout.mla_row_bytes == 32 + 4 + 16 * 2
    assert layout.index_row_bytes == 32 + 4
    real = dataclasses.replace(layout, latent=512, mla_row=576, index_row=128)
    assert (real.mla_row_bytes, real.index_row_bytes) == (656, 132)


def test_fp8_views_cover_every_byte_once(tiny_checkpoint: Path) -> None:
    layout = KvLayout.of(read_model_spec(tiny_checkpoint), 4, "fp8")
    pool = Pool(layout, 3)
    pool.touch()
    parts = [p for r in views(pool) for p in (r.values, r.scales, r.rest) if p is not None]
    for part in parts:
        bytes_of = part.view(torch.uint8)
        bytes_of += 1
    used = layout.block_size * layout.token_bytes
    assert (pool.tensor[:, :used] == 1).all()
    assert (pool.tensor[:, used:] == 0).all()


def test_fp8_that_does_not_fit_a_model_is_refused_by_name(tiny_checkpoint: Path) -> None:
    spec = dataclasses.replace(read_model_spec(tiny_checkpoint), kv_lora_rank=192)
    with pytest.raises(ConfigError, match=r"model\.kv_cache_dtype: found fp8; the checkpoint's kv_lora_rank is 192"):
        KvLayout.of(spec, 4, "fp8")


def test_a_copied_block_brings_all_layers(layout: KvLayout) -> None:
    source, target = Pool(layout, 3), Pool(layout, 5)
    source.touch()
    target.touch()
    for number, view in enumerate(views(source)):
        view[2] = number + 1
    target.tensor[4] = source.tensor[2]
    for number, view in enumerate(views(target)):
        assert (view[4] == number + 1).all()
        assert (view[:4] == 0).all()
