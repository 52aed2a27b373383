"""The three paged operations of sparse attention in plain PyTorch: what runs on CPU, and the oracle of faster ones.

Shapes: T rows (query tokens), H heads, S sequences, L context positions, K selected positions. A selected position of
-1 means "none"; the code below never reads through it.
"""

from __future__ import annotations

import torch

from glm52_engine.kernels import cache_rows

_TILE_ELEMENTS = 1 << 24
"""Most elements of an intermediate tensor: 64 MiB of float32, whatever the context length."""


def index_scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Score of every context position for every row: sum over heads of weight × relu(query · key).

    query [S, C, H, D] already scaled, weights float32 [S, C, H], keys [S, L, D]; result float32 [S, C, L].
    """
    sequences, rows, heads, dim = query.shape
    length = keys.shape[1]
    keys = keys.float().transpose(1, 2)
    step = max(1, _TILE_ELEMENTS // max(1, sequences * heads * length))
    tiles = []
    for first in range(0, rows, step):
        part = query[:, first : first + step].float()
        count = part.shape[1]
        per_head = torch.bmm(part.reshape(sequences, count * heads, dim), keys).relu_()
        per_head = per_head.view(sequences * count, heads, length)
        weight = weights[:, first : first + step].reshape(sequences * count, 1, heads)
        tiles.append(torch.bmm(weight, per_head).view(sequences, count, length))
    return torch.cat(tiles, dim=1) if len(tiles) > 1 else tiles[0]


def select_top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k best scores of each row, ascending, then -1; among equal scores the lowest position wins.

    scores float32 [T, L] with -inf where a row must not look; result int64 [T, min(k, L)].

    Ties are common, because relu makes whole plateaus of exact zeros, and `torch.topk` leaves their order open: two
    ranks, or prefill and decode, would then attend to different tokens.
    """
    rows, length = scores.shape
    k = min(k, length)
    threshold = scores.topk(k, dim=1).values[:, -1:]
    chosen = scores >= threshold
    # A row with less than k to see has the threshold -inf: what it must not look at ties with it.
    chosen &= scores != -torch.inf
    if (chosen.sum(dim=1) > k).any():
        better = scores > threshold
        tied = chosen & ~better
        chosen = better | (tied & (tied.cumsum(dim=1) <= k - better.sum(dim=1, keepdim=True)))
    row, position = chosen.nonzero(as_tuple=True)
    counts = chosen.sum(dim=1)
    first = counts.cumsum(dim=0) - counts
    selected = torch.full((rows, k), -1, dtype=torch.int64)
    selected[row, torch.arange(len(row)) - first[row]] = position
    return selected


def sparse_attention(
    query: torch.Tensor,
    rows: cache_rows.Rows,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    missing: torch.Tensor,
    *,
    latent: int,
    scale: float,
) -> torch.Tensor:
    """Attention of each query to its own selected rows of the paged MLA cache, in the latent space.

    query [T, H, R], rows [num_blocks, block_size, R], blocks/offsets int64 [T, K] (valid everywhere, also where
    `missing` bool [T, K] is set); the first `latent` elements of a row are its value. Result [T, H, latent].
    """
    count, heads, width = query.shape
    step = max(1, _TILE_ELEMENTS // max(1, blocks.shape[1] * max(width, heads)))
    out = query.new_empty(count, heads, latent)
    for first in range(0, count, step):
        tile = slice(first, first + step)
        gathered = cache_rows.load(rows, (blocks[tile], offsets[tile]), query.dtype)
        scores = torch.bmm(query[tile], gathered.transpose(1, 2)).float().mul_(scale)
        scores.masked_fill_(missing[tile].unsqueeze(1), -torch.inf)
        out[tile] = torch.bmm(scores.softmax(dim=-1).to(query.dtype), gathered[..., :latent])
    return out
