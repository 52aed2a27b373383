"""The plain-PyTorch operations against versions too simple to be wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.kernels import reference
from glm52_engine.kernels.reference import index_scores, select_top_k, sparse_attention

# Few different values, so that ties are everywhere, and rows with nothing to see at the end.
rows = st.integers(1, 24).flatmap(
    lambda length: st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, -3.0, -math.inf]), min_size=length, max_size=length),
        min_size=1,
        max_size=4,
    )
)


@given(rows=rows, k=st.integers(1, 30))
def test_top_k(rows: list[list[float]], k: int) -> None:
    chosen = select_top_k(torch.tensor(rows), k).tolist()
    for scores, got in zip(rows, chosen, strict=True):
        seen = [position for position, score in enumerate(scores) if score > -math.inf]
        best = sorted(sorted(seen, key=lambda position: (-scores[position], position))[:k])
        assert got == best + [-1] * (min(k, len(scores)) - len(best))


@pytest.mark.parametrize("tile", [1, 1 << 24])
def test_index_scores(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(reference, "_TILE_ELEMENTS", tile)
    torch.manual_seed(0)
    query, weights, keys = torch.randn(2, 5, 3, 4), torch.randn(2, 5, 3), torch.randn(2, 7, 4)
    expected = torch.einsum("sch,schl->scl", weights, torch.einsum("schd,sld->schl", query, keys).relu())
    torch.testing.assert_close(index_scores(query, weights, keys), expected)


@pytest.mark.parametrize("tile", [1, 1 << 24])
def test_sparse_attention(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(reference, "_TILE_ELEMENTS", tile)
    torch.manual_seed(0)
    query, pool = torch.randn(3, 2, 6), torch.randn(4, 5, 6)
    blocks, offsets = torch.randint(0, 4, (3, 8)), torch.randint(0, 5, (3, 8))
    missing = torch.zeros(3, 8, dtype=torch.bool)
    missing[1, 3:] = True
    got = sparse_attention(query, pool, blocks, offsets, missing, latent=4, scale=0.5)
    for row in range(3):
        kept = pool[blocks[row], offsets[row]][~missing[row]]
        expected = (query[row] @ kept.T * 0.5).softmax(-1) @ kept[:, :4]
        torch.testing.assert_close(got[row], expected)
