"""One rank's KV in host memory: a page-first slab in which a block is one contiguous run of bytes across all layers.

Inside a block: for every layer its MLA rows [block_size, mla_row], then for every full layer its index keys
[block_size, index_row], then as much as makes the block a whole number of MLA rows, so that every row of a pool lies
on one grid, as kernels want it. A hand-off therefore copies one run per block, however many layers there are, and
blocks of host and device are the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.sizing import kv_token_bytes

ROPE_LAYOUT = "interleaved"
"""Order of the rotated elements in a stored row: pairs stay where they were (2i, 2i+1)."""

LAYOUT_VERSION = 2
"""Raised whenever the bytes of a block change their meaning."""

_TOUCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of a block. `mla_row` and `index_row` in elements of `dtype`, `block_size` in tokens."""

    block_size: int
    layers: int
    full_layers: tuple[int, ...]
    mla_row: int
    index_row: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, block_size: int) -> KvLayout:
        return cls(
            block_size=block_size,
            layers=spec.num_hidden_layers,
            full_layers=spec.full_layers,
            mla_row=spec.mla_row,
            index_row=spec.index_head_dim,
            dtype=getattr(torch, spec.dtype),
        )

    @property
    def token_bytes(self) -> int:
        size = self.dtype.itemsize
        return kv_token_bytes(
            layers=self.layers,
            mla_row=self.mla_row * size,
            full_layers=len(self.full_layers),
            index_row=self.index_row * size,
        )

    @property
    def block_rows(self) -> int:
        """A block in MLA rows, of which the last may be padding."""
        return -(-self.block_size * self.token_bytes // (self.mla_row * self.dtype.itemsize))

    @property
    def block_bytes(self) -> int:
        return self.block_rows * self.mla_row * self.dtype.itemsize


class Pool:
    """Implements `runtime.types.KvPool`, with typed views of the slab for the model.

    `mla[layer]` is [num_blocks, block_size, mla_row], `index[layer]` (full layers only) is
    [num_blocks, block_size, index_row]; both write through to `tensor`.
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        self.block_bytes = layout.block_bytes
        self.tensor = torch.empty(num_blocks, layout.block_bytes, dtype=torch.uint8)
        elements = self.tensor.view(layout.dtype)
        self.mla: list[torch.Tensor] = []
        self.index: dict[int, torch.Tensor] = {}
        offset = 0
        for _ in range(layout.layers):
            self.mla.append(_rows(elements, offset, layout.block_size, layout.mla_row))
            offset += layout.block_size * layout.mla_row
        for layer in layout.full_layers:
            self.index[layer] = _rows(elements, offset, layout.block_size, layout.index_row)
            offset += layout.block_size * layout.index_row

    def touch(self) -> None:
        """Give every page its memory now: later the first request would pay, or the kernel would kill the pod."""
        step = max(1, _TOUCH_BYTES // self.block_bytes)
        for first in range(0, self.num_blocks, step):
            self.tensor[first : first + step].zero_()


def _rows(elements: torch.Tensor, offset: int, block_size: int, row: int) -> torch.Tensor:
    """View [num_blocks, block_size, row] of the elements that start at `offset` in every block."""
    return elements[:, offset : offset + block_size * row].unflatten(1, (block_size, row))
