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
from glm52_engine.config import ConfigError, KvCacheDtype
from glm52_engine.kernels.cache_rows import GROUP, Fp8Rows, Rows, group_of
from glm52_engine.sizing import kv_token_bytes

ROPE_LAYOUT = "interleaved"
"""Order of the rotated elements in a stored row: pairs stay where they were (2i, 2i+1)."""

LAYOUT_VERSION = 2
"""Raised whenever the bytes of a block change their meaning."""

_TOUCH_BYTES = 64 << 20


FP8 = torch.float8_e4m3fn
"""What `KvLayout.dtype` is where rows are stored as `kernels.cache_rows` describes."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry of a block. `mla_row`, of which the first `latent`, and `index_row` in elements; `block_size` in tokens.

    `dtype` is that of every element, or FP8: then `latent` and index keys are e4m3 with float32 scales and the rest of
    an MLA row is bfloat16. In FP8 a block's scales of index keys stand behind all keys of their layer.
    """

    block_size: int
    layers: int
    full_layers: tuple[int, ...]
    latent: int
    mla_row: int
    index_row: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, block_size: int, kv_cache_dtype: KvCacheDtype = "auto") -> KvLayout:
        """`auto` is the model's own dtype. Raises ConfigError where FP8 does not fit the model's rows."""
        if kv_cache_dtype == "fp8":
            _check_fp8("kv_lora_rank", spec.kv_lora_rank, most=None)
            _check_fp8("index_head_dim", spec.index_head_dim, most=GROUP)
        stored = {"auto": getattr(torch, spec.dtype), "bf16": torch.bfloat16, "fp8": FP8}
        return cls(
            block_size=block_size,
            layers=spec.num_hidden_layers,
            full_layers=spec.full_layers,
            latent=spec.kv_lora_rank,
            mla_row=spec.mla_row,
            index_row=spec.index_head_dim,
            dtype=stored[kv_cache_dtype],
        )

    @property
    def mla_row_bytes(self) -> int:
        if self.dtype != FP8:
            return self.mla_row * self.dtype.itemsize
        return _fp8_bytes(self.latent) + (self.mla_row - self.latent) * torch.bfloat16.itemsize

    @property
    def index_row_bytes(self) -> int:
        return _fp8_bytes(self.index_row) if self.dtype == FP8 else self.index_row * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return kv_token_bytes(
            layers=self.layers,
            mla_row=self.mla_row_bytes,
            full_layers=len(self.full_layers),
            index_row=self.index_row_bytes,
        )

    @property
    def block_rows(self) -> int:
        """A block in MLA rows, of which the last may be padding."""
        return -(-self.block_size * self.token_bytes // self.mla_row_bytes)

    @property
    def block_bytes(self) -> int:
        return self.block_rows * self.mla_row_bytes


class Pool:
    """Implements `runtime.types.KvPool`, with typed views of the slab for the model.

    `mla[layer]` is [num_blocks, block_size, mla_row], `index[layer]` (full layers only) is
    [num_blocks, block_size, index_row]; both write through to `tensor`. In FP8 they are `Fp8Rows`.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, slab: torch.Tensor | None = None) -> None:
        """`slab` uint8 [num_blocks × block_bytes]: memory that was taken elsewhere, as for pinning."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        self.block_bytes = layout.block_bytes
        whole = torch.empty(num_blocks * layout.block_bytes, dtype=torch.uint8) if slab is None else slab
        self.tensor = whole.view(num_blocks, layout.block_bytes)
        self.mla, self.index = block_views(layout, self.tensor)

    def touch(self) -> None:
        """Give every page its memory now: later the first request would pay, or the kernel would kill the pod."""
        step = max(1, _TOUCH_BYTES // self.block_bytes)
        for first in range(0, self.num_blocks, step):
            self.tensor[first : first + step].zero_()


def block_views(layout: KvLayout, slab: torch.Tensor) -> tuple[list[Rows], dict[int, Rows]]:
    """MLA rows by layer and index keys by full layer, as views of blocks: slab uint8 [num_blocks, block_bytes]."""
    size, offset = layout.block_size, 0
    mla: list[Rows] = []
    for _ in range(layout.layers):
        part = _part(slab, offset, size, layout.mla_row_bytes)
        mla.append(mla_rows(layout, part))
        offset += size * layout.mla_row_bytes
    index: dict[int, Rows] = {}
    for layer in layout.full_layers:
        if layout.dtype == FP8:
            scales = _part(slab, offset + size * layout.index_row, size, torch.float32.itemsize).view(torch.float32)
            index[layer] = Fp8Rows(_part(slab, offset, size, layout.index_row).view(FP8), scales, None)
        else:
            index[layer] = _part(slab, offset, size, layout.index_row_bytes).view(layout.dtype)
        offset += size * layout.index_row_bytes
    return mla, index


def mla_rows(layout: KvLayout, rows: torch.Tensor) -> Rows:
    """uint8 [.., mla_row_bytes] as the MLA rows that it holds."""
    if layout.dtype != FP8:
        return rows.view(layout.dtype)
    latent, behind = layout.latent, _fp8_bytes(layout.latent)
    return Fp8Rows(
        rows[..., :latent].view(FP8),
        rows[..., latent:behind].view(torch.float32),
        rows[..., behind:].view(torch.bfloat16),
    )


def _part(slab: torch.Tensor, offset: int, block_size: int, row: int) -> torch.Tensor:
    """View [num_blocks, block_size, row] of the bytes that start at `offset` in every block."""
    return slab[:, offset : offset + block_size * row].unflatten(1, (block_size, row))


def _fp8_bytes(width: int) -> int:
    """Of `width` elements in FP8, with their scales."""
    return width + width // group_of(width) * torch.float32.itemsize


def _check_fp8(name: str, width: int, *, most: int | None) -> None:
    """Scales stand behind the elements and need their alignment; an index key has one."""
    whole = width % GROUP == 0 if width > GROUP else width >= 4 and width & (width - 1) == 0
    if not whole or (most is not None and width > most):
        wanted = f"a power of two from 4 to {GROUP}" + ("" if most else f", or a multiple of {GROUP}")
        raise ConfigError(
            f"model.kv_cache_dtype: found fp8; the checkpoint's {name} is {width}, and FP8 needs {wanted}: say bf16"
        )
