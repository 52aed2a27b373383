"""Prefill on a GPU: chunks of thousands of rows, where the matrix products of the libraries are at their best.

The same arithmetic and the same cache as `device.py`'s decode step; rows of several sequences may lie in one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from glm52_engine.kernels import index as index_kernels
from glm52_engine.kernels import linear as linear_kernels
from glm52_engine.kernels import mla, moe, rows
from glm52_engine.kernels.cache_rows import Rows, load
from glm52_engine.model.device import DevicePool
from glm52_engine.model.device_weights import DeviceWeights, LayerWeights
from glm52_engine.model.exchange import Exchange, check_experts
from glm52_engine.model.grouped import gated, grouped_linear
from glm52_engine.model.matrix import Matrix
from glm52_engine.model.mla import LATENT_NORM_EPS
from glm52_engine.model.rope import inverse_frequencies
from glm52_engine.model.spread import SpreadPrefill


@dataclass(frozen=True, slots=True)
class _Context:
    """Where the rows of a chunk find their contexts: index keys by `table`, MLA rows by `places`, int32 [T, pages].

    FlashMLA's kernel for many queries reads no FP8. There each layer's rows of every sequence of the chunk are widened
    into one buffer, `wide` [S × pages × block_size, latent + rope], by its own block table `sequences` [S, pages]:
    as many bytes as one layer of the context, for a thousandth of the chunk's time.
    """

    table: torch.Tensor
    places: torch.Tensor
    block_rows: int
    sequences: torch.Tensor | None
    wide: torch.Tensor | None

    def keys(self, stored: Rows, dtype: torch.dtype) -> tuple[Rows, torch.Tensor]:
        """Index keys of a layer, and the block table by which rows find theirs.

        FP8 keys are widened too: converting a key again for every row costs more than the bytes that it saves.
        """
        if self.sequences is None:
            return stored, self.table
        return load(stored, (self.sequences.long(),), dtype).flatten(0, 1), self.places

    def rows(self, pool: DevicePool, layer: int) -> torch.Tensor:
        """This layer's MLA rows, which `places` counts in."""
        stored = pool.mla[layer]
        if isinstance(stored, torch.Tensor):
            return stored
        assert self.sequences is not None, "FP8 rows are widened for FlashMLA alone"
        assert self.wide is not None
        mla.widen_rows(stored, self.sequences, self.wide, block_size=pool.block_size, block_rows=pool.block_rows)
        return self.wide


_SCORE_ROWS = 2048
"""Rows whose index scores exist at once: 512 MiB of float32 at 65,536 tokens of context."""


class Prefill:
    """Runs chunks of at most `most_rows` rows.

    FP8 weights are widened to the model's dtype before their product, every chunk anew, into one buffer as large as the
    largest of them: in bfloat16 4 × inner × hidden bytes for each expert of a layer. It moves 3 bytes a weight. Where
    experts are spread over ranks there is a second buffer, half as large: a chunk is exchanged in several pieces, and
    each of them takes both matrices of the layer's experts.
    """

    def __init__(
        self, weights: DeviceWeights, pool: DevicePool, *, most_rows: int, exchange: Exchange | None = None
    ) -> None:
        """`exchange`: the routed experts are spread over ranks, all of which run each pass together.

        Raises ValueError where the weights are those of other experts than that needs.
        """
        spec = weights.spec
        check_experts(weights.experts, spec.n_routed_experts, exchange)
        self._weights, self._pool, self.most_rows = weights, pool, most_rows
        self._device = weights.embed.device
        self._frequencies = inverse_frequencies(spec.qk_rope_head_dim, spec.rope_theta).to(self._device)
        self._active = torch.full((), most_rows, dtype=torch.int32, device=self._device)
        self._counts = index_kernels.top_k_counts(min(most_rows, _SCORE_ROWS), self._device)
        heads, latent, rope = spec.num_attention_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
        self._flash = mla.flash_usable(heads, latent, rope, pool.layout.dtype, self._device)
        matrices = [m for layer in weights.layers for m in (layer.a, layer.b, layer.o, layer.up, layer.down)]
        self._wide = weights.embed.new_empty(max(_widened(m) for m in matrices))
        self._spread: SpreadPrefill | None = None
        if exchange is not None:
            self._spread = SpreadPrefill(weights.experts, exchange)
            down = [layer.down for layer in weights.layers if layer.gate is not None]
            self._wide_down = weights.embed.new_empty(max(map(_widened, down), default=0))

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, longest: int,
        logit_rows: torch.Tensor, *, together: int = 1, trace: list[torch.Tensor] | None = None,
        bucket: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write the rows' KV, return logits float32 [len(logit_rows), vocab].

        tokens, positions int64 [T]; table int32 [T, blocks] the block table of each row's sequence (rows of one
        sequence may share memory); `longest` the longest context, in tokens; all rows of earlier chunks are there.
        `together` (1, 2 or 4): so many rows at a time are of one sequence. `trace` receives what each layer gets.
        `bucket`, with an exchange: rows as which every rank takes part, the same number on all of them and at least T.
        """
        spec, weights = self._weights.spec, self._weights
        count, dim = len(tokens), spec.hidden_size
        if self._spread is not None and (bucket is None or bucket < count):
            raise ValueError(f"bucket: found {bucket} for {count} rows; expected as many as the longest rank has")
        new = weights.embed.new_empty
        hidden, normed = new(count, dim), new(count, dim)
        cos, sin = (new((count, spec.qk_rope_head_dim // 2), dtype=torch.float32) for _ in range(2))
        slots = new(count, dtype=torch.int32)
        rows.begin(
            tokens, positions, weights.embed, hidden, cos, sin, table, slots, self._active, self._frequencies,
            block_size=self._pool.block_size, block_rows=self._pool.block_rows,
        )  # fmt: skip
        lengths = (positions + 1).int()
        context = self._context(table, longest)
        selected = torch.full((count, spec.index_topk), -1, dtype=torch.int32, device=self._device)
        added: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            rows.add_norm(hidden, added, layer.input_norm, normed, spec.rms_norm_eps)
            if trace is not None:
                trace.append(hidden.clone())
            place = rows.Place(slots, cos, sin, self._pool.mla[index], self._pool.block_rows)
            attended = self._attention(index, layer, normed, place, context, lengths, longest, selected, together)
            rows.add_norm(hidden, attended.unsqueeze(0), layer.mlp_norm, normed, spec.rms_norm_eps)
            added = self._mlp(layer, normed, bucket).unsqueeze(0)
        rows.add_norm(hidden, added, weights.norm, normed, spec.rms_norm_eps)
        return F.linear(normed[logit_rows], weights.head).float()

    def idle(self, bucket: int) -> None:
        """This rank's part of a pass of `bucket` rows in which it has none."""
        assert self._spread is not None, "ranks without an exchange have passes of their own"
        spec, embed = self._weights.spec, self._weights.embed
        none = embed.new_empty(0, spec.hidden_size)
        chosen = torch.empty(0, spec.num_experts_per_tok, dtype=torch.int64, device=self._device)
        for layer in self._weights.layers:
            if layer.gate is not None:
                up, down = self._values(layer.up), self._values(layer.down, self._wide_down)
                self._spread.run(none, chosen, chosen.float(), none, up[:-1], down[:-1], bucket)

    def _attention(
        self, index: int, layer: LayerWeights, normed: torch.Tensor, place: rows.Place, context: _Context,
        lengths: torch.Tensor, longest: int, selected: torch.Tensor, together: int,
    ) -> torch.Tensor:  # fmt: skip
        spec, pool, count = self._weights.spec, self._pool, len(normed)
        heads, latent, rope = spec.num_attention_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
        keys = None
        if layer.key_norm is not None:
            scale = (spec.index_n_heads * spec.index_head_dim) ** -0.5
            head_weights = normed.new_empty((count, spec.index_n_heads), dtype=torch.float32)
            keys = rows.IndexRow(*layer.key_norm, pool.keys[index], head_weights, scale)
        q_latent = normed.new_empty(count, spec.q_lora_rank)
        a = F.linear(normed, self._values(layer.a)).unsqueeze(0)
        rows.latents(a, q_latent, place, rows.Norms(layer.q_norm, layer.kv_norm), keys, eps=LATENT_NORM_EPS)
        b = F.linear(q_latent, self._values(layer.b)).unsqueeze(0)
        query = normed.new_empty(count, heads, latent + rope)
        index_query = None if keys is None else normed.new_empty(count, spec.index_n_heads, spec.index_head_dim)
        mla.absorb(
            b, layer.kv_b, place.cos, place.sin, query, index_query, nope=spec.qk_nope_head_dim, value=spec.v_head_dim,
            varying=True,
        )  # fmt: skip
        if keys is not None and index_query is not None:
            self._select(index_query, keys, context, lengths, longest, selected, together)
        out = normed.new_empty(count, heads, latent)
        scale = spec.qk_head_dim**-0.5
        if self._flash:
            out = mla.attend_flash(query, context.rows(pool, index), selected, out, 1, scale=scale)
        else:
            mla.attend(query, pool.mla[index], selected, lengths, out, None, scale=scale)
        values = normed.new_empty(count, heads, spec.v_head_dim)
        mla.expand(out, layer.kv_b, values, nope=spec.qk_nope_head_dim, varying=True)
        return F.linear(values.flatten(1), self._values(layer.o))

    def _select(
        self, query: torch.Tensor, keys: rows.IndexRow, context: _Context, lengths: torch.Tensor, longest: int,
        selected: torch.Tensor, together: int,
    ) -> None:  # fmt: skip
        spec, pool = self._weights.spec, self._pool
        stored, table = context.keys(keys.keys, query.dtype)
        # Rows on a grid: of other widths the kernels would be others, and store numbers one by one.
        scores = query.new_empty((min(_SCORE_ROWS, len(query)), -(-longest // 16) * 16), dtype=torch.float32)
        scores = scores[:, :longest]
        for first in range(0, len(query), _SCORE_ROWS):
            part = slice(first, first + _SCORE_ROWS)
            # `top_k` zeroes the second buffer only as far as this tile's rows: the next tile may have more.
            self._counts[0].zero_()
            index_kernels.scores(
                query[part], keys.head_weights[part], stored, table[part], lengths[part],
                scores[: len(query[part])],
                top_k=spec.index_topk, counts=self._counts[0], together=together, varying=True,
            )  # fmt: skip
            index_kernels.top_k(
                scores[: len(query[part])], lengths[part], context.places[part], selected[part], self._counts,
                block_size=pool.block_size, block_rows=context.block_rows, counted=True, varying=True,
            )  # fmt: skip

    def _context(self, table: torch.Tensor, longest: int) -> _Context:
        pool = self._pool
        if not (self._flash and pool.pages):
            return _Context(table, table, pool.block_rows, None, None)
        table = table[:, : -(-longest // pool.block_size)]
        pages = torch.arange(table.shape[1], dtype=torch.int32, device=self._device)
        if table.stride(0) == 0 or len(table) == 1:
            sequences, places = table[:1], pages.expand(len(table), -1)
        else:
            first = torch.ones(len(table), dtype=torch.bool, device=self._device)
            first[1:] = (table[1:] != table[:-1]).any(1)
            sequences = table[first]  # waits for the device: how many there are is not known before
            places = (first.cumsum(0) - 1).int().unsqueeze(1) * table.shape[1] + pages
        width = self._weights.spec.mla_row
        wide = self._weights.embed.new_empty(sequences.numel() * pool.block_size, width)
        return _Context(table, places, pool.block_size, sequences, wide)

    def _values(self, matrix: Matrix, into: torch.Tensor | None = None) -> torch.Tensor:
        """A matrix in the model's dtype; of an FP8 one, valid until the next call that has the same buffer `into`."""
        if matrix.scale is None:
            return matrix.weight
        out = (self._wide if into is None else into)[: matrix.weight.numel()].view(matrix.weight.shape)
        linear_kernels.widen(matrix.weight, matrix.scale, out)
        return out

    def _mlp(self, layer: LayerWeights, x: torch.Tensor, bucket: int | None) -> torch.Tensor:
        up = self._values(layer.up)
        shared = gated(F.linear(x, up[-1]), torch.ones(len(x), device=x.device))
        if layer.gate is None or layer.bias is None:
            return F.linear(shared, self._values(layer.down)[-1])
        experts, weights = self._route(x, layer.gate, layer.bias)
        if self._spread is not None and bucket is not None:
            down = self._values(layer.down, self._wide_down)
            return self._spread.run(x, experts, weights, F.linear(shared, down[-1]), up[:-1], down[:-1], bucket)
        top = experts.shape[1]
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=len(layer.gate)).cumsum(0).int()
        both = grouped_linear(x[order // top], up[:-1], ends)
        weighted = gated(both, weights.flatten()[order].contiguous())
        down = self._values(layer.down)
        parts = grouped_linear(weighted, down[:-1], ends)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=x.device)
        out = torch.empty_like(x)
        moe.gather_sum(F.linear(shared, down[-1]), parts, places.view(-1, top), out)
        return out

    def _route(self, x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts int64 and their weights float32 of every row, [T, top] each."""
        spec = self._weights.spec
        # float32 throughout: in bfloat16 a near-tie between experts would fall the other way.
        scores = F.linear(x.float(), gate.float()).sigmoid()
        experts = (scores + bias).topk(spec.num_experts_per_tok, dim=1).indices
        weights = scores.gather(1, experts)
        if spec.norm_topk_prob:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return experts, weights * spec.routed_scaling_factor


def _widened(matrix: Matrix) -> int:
    """Elements of the buffer that it is widened into."""
    return 0 if matrix.scale is None else matrix.weight.numel()
