"""GLM-5.2 on a GPU: fused weights, and a decode step of fixed shape that a CUDA graph can hold.

The arithmetic is that of `model.py`; what differs is how much of it one kernel does. Every buffer exists before the
first step and nothing is decided on the host, so that a step is one graph replay.
"""

from __future__ import annotations

import dataclasses

import torch

from glm52_engine.checkpoint.config import ModelSpec
from glm52_engine.kernels import index as index_kernels
from glm52_engine.kernels import linear as linear_kernels
from glm52_engine.kernels import mla, moe, rows
from glm52_engine.kv.hisparse import HotStep
from glm52_engine.kv.pools import FP8, KvLayout, block_views, mla_rows
from glm52_engine.model.device_weights import DeviceWeights, LayerWeights
from glm52_engine.model.exchange import Exchange, check_experts
from glm52_engine.model.matrix import Matrix
from glm52_engine.model.mla import LATENT_NORM_EPS
from glm52_engine.model.rope import inverse_frequencies
from glm52_engine.model.sparse_pool import SparsePool
from glm52_engine.model.spread import SpreadStep


class DevicePool:
    """KV of one rank on a GPU: page-first like the host pool, padded so that every layer's rows lie on one grid.

    `mla[layer]` is the flat view [rows, latent + rope] in which token (block, offset) is row
    block × `block_rows` + offset; `keys[layer]` (full layers) is [blocks, block_size, index_dim]. With `dtype`
    float8_e4m3fn both are `Fp8Rows`, and `pages[layer]` is what FlashMLA's FP8 kernel takes for `mla[layer]`.
    """

    def __init__(self, spec: ModelSpec, blocks: int, block_size: int, dtype: torch.dtype, device: str) -> None:
        self.layout = layout = dataclasses.replace(KvLayout.of(spec, block_size), dtype=dtype)
        self.blocks, self.block_size, self.block_rows = blocks, block_size, layout.block_rows
        row, count = layout.mla_row_bytes, blocks * layout.block_rows
        # A layer's last page may reach beyond the last block.
        whole = torch.zeros(count + mla.FLASH_PAGE, row, dtype=torch.uint8, device=device)
        slab = whole[:count].view(blocks, layout.block_bytes)
        self.tensor = slab if dtype == FP8 else slab.view(dtype)
        firsts = [layer * block_size for layer in range(layout.layers)]
        self.mla = [mla_rows(layout, whole[first:count]) for first in firsts]
        self.keys = block_views(layout, slab)[1]
        self.pages: list[torch.Tensor] = []
        if dtype == FP8:
            for first in firsts:
                pages = -(-(count - first) // mla.FLASH_PAGE)
                self.pages.append(whole[first : first + pages * mla.FLASH_PAGE].view(pages, mla.FLASH_PAGE, 1, row))


class DecodeStep:
    """One decode step for exactly `batch` rows over at most `longest` tokens of context each.

    Inputs, on the device, advanced by the step itself: tokens, positions int64 [T]; lengths int32 [T] (context
    including the row's token); table int32 [T, blocks]; active int32 [] rows that are real; with HiSparse also seats
    int32 [T] and frames int32 [T, blocks], each row's of the pool's, which stay.

    Output: chosen int32 [2, T], in pinned memory that the step itself writes to: a copy behind it would stand between
    two steps. Steps take turns with its rows, so that one may begin while the host still reads the other's; `turn` is
    that of the last one.
    """

    def __init__(
        self, weights: DeviceWeights, pool: DevicePool | SparsePool, *, batch: int, longest: int, vocab_bound: int,
        exchange: Exchange | None = None, larger: DecodeStep | None = None,
    ) -> None:  # fmt: skip
        """`exchange`: the routed experts are spread over ranks, all of which run a step of this batch together. What
        that takes of memory is shared with `larger`: a step of at least as many rows, never under way with this one.

        Raises ValueError where the weights are those of other experts than that needs.
        """
        spec = weights.spec
        check_experts(weights.experts, spec.n_routed_experts, exchange)
        self._weights, self._pool, self._vocab_bound = weights, pool, vocab_bound
        device, dtype = weights.embed.device, weights.embed.dtype
        self.batch = batch

        def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=of, device=device)

        def split(matrix: Matrix) -> torch.Tensor:
            out = len(matrix.weight)
            parts = linear_kernels.splits_for(out, batch)
            return empty(parts, batch, out, of=torch.float32 if parts > 1 else dtype)

        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self.lengths = torch.ones(batch, dtype=torch.int32, device=device)
        self.table = torch.zeros(batch, -(-longest // pool.block_size), dtype=torch.int32, device=device)
        self.active = torch.full((), batch, dtype=torch.int32, device=device)
        self.chosen = torch.zeros(2, batch, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.turn = torch.zeros((), dtype=torch.int32, device=device)
        self.seats = torch.zeros(batch, dtype=torch.int32, device=device)
        self._hot = HotStep(pool.hot, batch) if isinstance(pool, SparsePool) else None
        self.frames = torch.zeros_like(self.table)
        self._whole = False

        heads, latent, rope = spec.num_attention_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
        self._frequencies = inverse_frequencies(rope, spec.rope_theta).to(device)
        self._hidden, self._normed = empty(batch, spec.hidden_size), empty(batch, spec.hidden_size)
        self._cos, self._sin = empty(batch, rope // 2, of=torch.float32), empty(batch, rope // 2, of=torch.float32)
        self._slots = empty(batch, of=torch.int32)
        self._q_latent = empty(batch, spec.q_lora_rank)
        splits = mla.attention_splits(batch, spec.index_topk)
        usable = mla.flash_usable(heads, latent, rope, pool.layout.dtype, device)
        self._flash_fp8 = mla.FlashFp8() if usable and pool.pages else None
        self._flash = splits if usable and not pool.pages else 0
        self._query = empty(batch * (self._flash or 1), heads, latent + rope)
        self._index_query = empty(batch, spec.index_n_heads, spec.index_head_dim)
        self._head_weights = empty(batch, spec.index_n_heads, of=torch.float32)
        self._scores = empty(batch, longest, of=torch.float32)
        self._selected = torch.full((batch, spec.index_topk), -1, dtype=torch.int32, device=device)
        self._counts = index_kernels.top_k_counts(batch, device)
        self._work = (
            (
                empty(batch, splits, heads, latent, of=torch.float32),
                empty(batch, splits, heads, of=torch.float32),
                empty(batch, splits, heads, of=torch.float32),
            )
            if splits > 1
            else None
        )
        self._attended = empty(batch, heads, latent)
        self._values = empty(batch, heads, spec.v_head_dim)
        self._a = [split(layer.a) for layer in weights.layers]
        self._b = [split(layer.b) for layer in weights.layers]
        self._o = split(weights.layers[0].o)
        vocab = len(weights.head)
        self._head = empty(linear_kernels.splits_for(vocab, batch), batch, vocab, of=torch.float32)
        self._dense = moe.Routed.everything(batch, device)
        spread = exchange if any(layer.gate is not None for layer in weights.layers) else None
        work = None if larger is None else larger._spread
        self._spread: SpreadStep | None = None if spread is None else SpreadStep(weights, batch, spread, work)
        self._routed: moe.Routed = (
            moe.Routed(batch, spec.n_routed_experts, spec.num_experts_per_tok, device)
            if self._spread is None
            else self._spread.routed
        )
        # Layers whose experts are spread have buffers of their own.
        here = [layer for layer in weights.layers if spread is None or layer.gate is None]
        inner = [layer.down.weight.shape[2] for layer in here]
        slots = [self._routed.slots if layer.gate is not None else 1 for layer in here]
        self._gated = {n: empty(batch, s, n) for n, s in zip(inner, slots, strict=True)}
        self._shares = {s: empty(batch, s, spec.hidden_size) for s in slots}

    def run(self, *, whole: bool = False) -> None:
        """Enqueue the step on the current stream. `whole`: as long as contexts lie whole in a `SparsePool`."""
        self._whole = whole
        spec, weights = self._weights.spec, self._weights
        rows.begin(
            self.tokens, self.positions, weights.embed, self._hidden, self._cos, self._sin, self.table, self._slots,
            self.active, self._frequencies, block_size=self._pool.block_size, block_rows=self._pool.block_rows,
            turn=self.turn,
        )  # fmt: skip
        if self._hot is not None and whole:
            self._hot.begin_whole(self.frames, self.positions, self._slots, self.active)
        elif self._hot is not None:
            self._hot.begin(self.seats, self._slots, self.active)
        if len(spec.full_layers) % 2:
            self._counts[0].zero_()  # the last full layer of the step before used it and zeroed the other
        counts = self._counts
        shares: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            rows.add_norm(self._hidden, shares, layer.input_norm, self._normed, spec.rms_norm_eps)
            self._attention(index, layer, counts)
            if layer.key_norm is not None:
                counts = counts[1], counts[0]
            rows.add_norm(self._hidden, self._o, layer.mlp_norm, self._normed, spec.rms_norm_eps)
            shares = self._mlp(layer)
        rows.add_norm(self._hidden, shares, weights.norm, self._normed, spec.rms_norm_eps)
        linear_kernels.linear(self._normed, weights.head, self._head)
        logits = self._head[0] if self._head.shape[0] == 1 else self._head.sum(0)
        rows.feed(
            logits,
            self.tokens,
            self.positions,
            self.lengths,
            self.chosen,
            self.active,
            self.turn,
            vocab_bound=self._vocab_bound,
        )
        if self._hot is not None:
            self._hot.end()
        self.logits = logits

    def experts_with_rows(self) -> int:
        """Experts of this rank that the last MoE layer of the last step used, the shared one included.

        Waits for the device.
        """
        return int(self._routed.busy[0])

    def _attention(self, index: int, layer: LayerWeights, counts: tuple[torch.Tensor, torch.Tensor]) -> None:
        spec, pool = self._weights.spec, self._pool
        a, b = self._a[index], self._b[index]
        linear_kernels.linear(self._normed, layer.a.weight, a, scale=layer.a.scale)
        keys = None
        if layer.key_norm is not None:
            scale = (spec.index_n_heads * spec.index_head_dim) ** -0.5
            keys = rows.IndexRow(*layer.key_norm, pool.keys[index], self._head_weights, scale)
        slots = self._slots if self._hot is None else self._hot.newest
        place = rows.Place(slots, self._cos, self._sin, pool.mla[index], pool.block_rows, self._slots)
        rows.latents(a, self._q_latent, place, rows.Norms(layer.q_norm, layer.kv_norm), keys, eps=LATENT_NORM_EPS)
        linear_kernels.linear(self._q_latent, layer.b.weight, b, scale=layer.b.scale)
        mla.absorb(
            b, layer.kv_b, self._cos, self._sin, self._query, self._index_query if keys is not None else None,
            nope=spec.qk_nope_head_dim, value=spec.v_head_dim, copies=self._flash or 1,
        )  # fmt: skip
        if keys is not None:
            index_kernels.scores(
                self._index_query, self._head_weights, keys.keys, self.table, self.lengths, self._scores,
                top_k=spec.index_topk, counts=counts[0],
            )  # fmt: skip
            # Index keys lie by block in either form; the rows that are read, by frame where contexts lie whole.
            places = self.frames if self._whole else self.table
            index_kernels.top_k(
                self._scores, self.lengths, places, self._selected, counts,
                block_size=pool.block_size, block_rows=pool.block_rows, counted=True,
            )  # fmt: skip
        selected = self._selected if self._hot is None else self._hot.fetch(index, self._selected)
        scale = spec.qk_head_dim**-0.5
        attended, cache = self._attended, pool.mla[index]
        if self._flash_fp8 is not None:
            attended = self._flash_fp8.attend(
                self._query, pool.pages[index], selected, latent=spec.kv_lora_rank, scale=scale
            )
        elif self._flash and isinstance(cache, torch.Tensor):
            attended = mla.attend_flash(self._query, cache, selected, attended, self._flash, scale=scale)
        else:
            mla.attend(self._query, cache, selected, self.lengths, attended, self._work, scale=scale)
        if self._hot is not None:
            self._hot.attended(index)
        mla.expand(attended, layer.kv_b, self._values, nope=spec.qk_nope_head_dim)
        linear_kernels.linear(self._values.flatten(1), layer.o.weight, self._o, scale=layer.o.scale)

    def _mlp(self, layer: LayerWeights) -> torch.Tensor:
        spec = self._weights.spec
        routed = self._dense
        if self._spread is not None and layer.gate is not None:
            return self._spread.run(layer, self._normed, self.active)
        if layer.gate is not None and layer.bias is not None:
            routed = self._routed
            moe.route(
                self._normed, layer.gate, layer.bias, self.active, routed,
                scaling=spec.routed_scaling_factor, normalise=spec.norm_topk_prob,
            )  # fmt: skip
        gated, shares = self._gated[layer.down.weight.shape[2]], self._shares[routed.slots]
        moe.up(self._normed, layer.up.weight, gated, routed, scale=layer.up.scale)
        moe.down(gated, layer.down.weight, shares, routed, scale=layer.down.scale)
        return shares.transpose(0, 1)
