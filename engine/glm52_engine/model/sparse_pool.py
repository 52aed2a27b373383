"""KV of one rank on a GPU with HiSparse: index keys of whole contexts, MLA rows only in the seats' hot buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import torch

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.kernels import mla
from glm52_engine.kernels.residency import HostRows
from glm52_engine.kv.hisparse import HotPool, layer_groups
from glm52_engine.kv.pools import FP8, KvLayout, Pool, block_views, mla_rows


def device_bytes(layout: KvLayout, *, blocks: int, seats: int, rows: int) -> int:
    """What a `SparsePool` takes of a device: index keys and their residency by block, hot buffers by seat."""
    full = len(layout.full_layers)
    by_token = layout.block_size * full * 2
    by_row = layout.layers * layout.mla_row_bytes + full * (4 + 2)
    return blocks * (_only_keys(layout).block_bytes + by_token) + (seats + 1) * (rows + 1) * by_row


class SparsePool:
    """What a decode step takes in place of a `DevicePool`; the MLA rows are those of `pool`, in pinned host memory.

    Blocks have the host's numbers, and here `block_rows` is `block_size`: a token's KV slot counts tokens. `mla[layer]`
    is the flat view of the layer's hot rows, `keys` and `pages` are as in `DevicePool`. `longest`: see `HotPool`.
    """

    def __init__(
        self, spec: ModelSpec, pool: Pool, *, seats: int, rows: int, device: str, longest: int | None = None,
        debug: bool = False, form: ModuleType | None = None,
    ) -> None:  # fmt: skip
        self.layout = layout = pool.layout
        self.blocks, self.block_size, self.block_rows = pool.num_blocks, layout.block_size, layout.block_size
        self.hot = HotPool(
            HostRows(pool.tensor, layout.block_size, layout.mla_row_bytes), layer_groups(spec.indexer_types),
            seats=seats, top_k=spec.index_topk, rows=rows, device=device, longest=longest, debug=debug, form=form,
        )  # fmt: skip
        self.mla = [mla_rows(layout, self.hot.rows(layer)) for layer in range(layout.layers)]
        self.pages: list[torch.Tensor] = []
        if layout.dtype == FP8:
            shape = (-1, mla.FLASH_PAGE, 1, layout.mla_row_bytes)
            self.pages = [self.hot.rows(layer).view(shape) for layer in range(layout.layers)]
        only_keys = _only_keys(layout)
        self._keys = torch.zeros(pool.num_blocks, only_keys.block_bytes, dtype=torch.uint8, device=device)
        self.keys = block_views(only_keys, self._keys)[1]
        first = layout.layers * layout.block_size * layout.mla_row_bytes
        self._host_keys = pool.tensor[:, first : first + layout.block_size * only_keys.token_bytes]
        self._copied = torch.cuda.Event() if self._keys.is_cuda else None
        self._warm_up()

    def _warm_up(self) -> None:
        """A sequence comes and goes: the first request would wait tens of milliseconds for what that compiles."""
        self.begin(0, [0], arrived=1)
        self.hot.settle({})
        self.to_host([0])
        self.settle()
        self.hot.release(0)
        self.hot.residency.counters.zero_()

    def begin(self, seat: int, blocks: Sequence[int], *, arrived: int) -> None:
        """A sequence takes the seat and the blocks; the KV of its first `arrived` tokens is in the host pool."""
        self.hot.assign(seat, blocks, arrived=arrived)
        ids = torch.tensor(blocks[: -(-arrived // self.block_size)], dtype=torch.int64)
        self.hot.form.copy_blocks(ids.to(self._keys.device), self._host_keys, self._keys)

    def to_host(self, blocks: Sequence[int]) -> None:
        """Enqueue copies of the blocks' index keys to host memory; the MLA rows are there."""
        ids = torch.tensor(blocks, dtype=torch.int64)
        width = self._host_keys.shape[1]
        self.hot.form.copy_blocks(ids.to(self._keys.device), self._keys[:, :width], self._host_keys)
        if self._copied is not None:
            self._copied.record()

    def settle(self) -> None:
        """Wait until what was enqueued by `to_host` is done."""
        if self._copied is not None:
            self._copied.synchronize()


def _only_keys(layout: KvLayout) -> KvLayout:
    """The same without MLA rows."""
    return dataclasses.replace(layout, layers=0)
