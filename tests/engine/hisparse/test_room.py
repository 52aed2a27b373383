"""Whether a GPU has room for what decode keeps there: all that any request may need, before any is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glm52_engine.checkpoint import read_model_spec
from glm52_engine.config import ConfigError, HiSparseConfig, RoleConfig
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.model.sparse_pool import device_bytes
from glm52_engine.runtime.device import gpus
from glm52_engine.sizing import GIB

BLOCKS, SEATS, ROWS = 40, 8, 64


def check(path: Path, monkeypatch: pytest.MonkeyPatch, free: int, total: int, hot_rows: int | None) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    pool = Pool(KvLayout.of(read_model_spec(path), 16), BLOCKS)
    hot = None if hot_rows is None else HiSparseConfig()
    role = RoleConfig(ranks_per_host=1, host_pool_gib=1, max_num_seqs=SEATS, hi_sparse=hot)
    gpus.check_room(0, pool, role, hot_rows)


def test_index_keys_and_hot_buffers_are_asked_for_together(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So admission needs no books of its own for them: a block of the host pool has its index keys on the GPU."""
    layout = KvLayout.of(read_model_spec(tiny_checkpoint), 16)
    need = device_bytes(layout, blocks=BLOCKS, seats=SEATS, rows=ROWS)
    total = 10 * need
    check(tiny_checkpoint, monkeypatch, need + total // 10, total, ROWS)
    with pytest.raises(ConfigError, match=r"index keys of the same tokens \+ .* hot buffers of 8 seats × 64 tokens"):
        check(tiny_checkpoint, monkeypatch, need + total // 10 - 1, total, ROWS)


def test_a_refusal_is_a_sum(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as refused:
        check(tiny_checkpoint, monkeypatch, 2 * GIB, 20 * GIB, 1 << 14)
    words = str(refused.value)
    assert "host_pool_gib: found 1: the GPU of rank 0 keeps" in words
    assert "of its 20 GiB it has 0 GiB left beside the weights at gpu_memory_percent 90" in words
    assert words.endswith("lower host_pool_gib, max_num_seqs or hi_sparse.device_buffer_size")


def test_without_hot_buffers_the_same_blocks_have_to_fit(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = KvLayout.of(read_model_spec(tiny_checkpoint), 16)
    need = BLOCKS * layout.block_bytes
    check(tiny_checkpoint, monkeypatch, need + need // 10 + 1, need, None)
    with pytest.raises(ConfigError, match=r"keeps the same blocks, .* lower host_pool_gib"):
        check(tiny_checkpoint, monkeypatch, need, need, None)
