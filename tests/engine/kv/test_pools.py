"""The slab: views that cover a block exactly once, and blocks that carry everything with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm52_engine.checkpoint import read_model_spec
from glm52_engine.kv import KvLayout, Pool


@pytest.fixture
def layout(tiny_checkpoint: Path) -> KvLayout:
    return KvLayout.of(read_model_spec(tiny_checkpoint), 4)


def views(pool: Pool) -> list[torch.Tensor]:
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
