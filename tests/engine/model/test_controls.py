"""Each mistake that other engines have shipped is made here on purpose: the comparison must notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import glm52_engine.model.indexer as indexer
import glm52_engine.model.mla as mla
from glm52_engine.kernels import reference
from glm52_engine.model.layer import Layer
from glm52_engine.model.moe import Router
from glm52_engine.model.rope import Rotation
from tests.engine.model.support import TOLERANCE, Ours, Theirs, prompt

Patch = pytest.MonkeyPatch


def half_split(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    cos, sin = (by.cos, by.sin) if x.dim() == 2 else (by.cos.unsqueeze(1), by.sin.unsqueeze(1))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope_of_the_indexer(patch: Patch) -> None:
    patch.setattr(indexer, "rotate", half_split)


def rope_of_attention(patch: Patch) -> None:
    patch.setattr(mla, "rotate", half_split)


def no_correction_bias(patch: Patch) -> None:
    route = Router.route

    def without(self: Any, x: torch.Tensor) -> Any:
        self._bias = torch.zeros_like(self._bias)
        return route(self, x)

    patch.setattr(Router, "route", without)


def bias_in_the_weights(patch: Patch) -> None:
    route = Router.route

    def biased(self: Any, x: torch.Tensor) -> Any:
        experts, weights = route(self, x)
        return experts, weights + self._bias[experts]

    patch.setattr(Router, "route", biased)


def selection_of_layer_0_everywhere(patch: Patch) -> None:
    forward = Layer.forward
    kept: list[Any] = []

    def stale(self: Any, hidden: Any, by: Any, step: Any, rows: Any, keys: Any, selection: Any) -> Any:
        out, selection = forward(self, hidden, by, step, rows, keys, kept[0] if kept else selection)
        kept.append(selection)
        return out, kept[0] if keys is None else selection

    patch.setattr(Layer, "forward", stale)


def mask_after_the_selection(patch: Patch) -> None:
    patch.setattr(indexer, "_causal", lambda scores, positions: scores)
    select = reference.select_top_k

    def late(scores: torch.Tensor, k: int) -> torch.Tensor:
        chosen = select(scores, k)
        rows = torch.arange(scores.shape[0]).unsqueeze(1)
        return torch.where(chosen <= rows, chosen, -1).clamp(max=scores.shape[1] - 1)

    patch.setattr(indexer, "select_top_k", late)


def key_norm_without_centring(patch: Patch) -> None:
    def rms(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    patch.setattr("torch.nn.functional.layer_norm", rms)


@pytest.mark.parametrize(
    "mistake",
    [
        rope_of_the_indexer,
        rope_of_attention,
        no_correction_bias,
        bias_in_the_weights,
        selection_of_layer_0_everywhere,
        mask_after_the_selection,
        key_norm_without_centring,
    ],
)
def test_a_mistake_is_noticed(
    tiny_checkpoint: Path, theirs: Theirs, monkeypatch: Patch, mistake: Callable[[Patch], None]
) -> None:
    ids = prompt(90)
    expected = theirs.all_logits(ids)
    assert (Ours(tiny_checkpoint).all_logits(ids) - expected).abs().max() < TOLERANCE
    with monkeypatch.context() as patch:
        mistake(patch)
        wrong = Ours(tiny_checkpoint).all_logits(ids)
    # Not finite counts as noticed.
    assert not (wrong - expected).abs().max() <= 100 * TOLERANCE


def test_indexer_mistakes_hide_below_k_tokens(tiny_checkpoint: Path, theirs: Theirs, monkeypatch: Patch) -> None:
    """Why every comparison here uses contexts longer than index_topk."""
    ids = prompt(32)
    rope_of_the_indexer(monkeypatch)
    assert (Ours(tiny_checkpoint).all_logits(ids) - theirs.all_logits(ids)).abs().max() < TOLERANCE


def test_a_shared_layer_needs_a_full_one_before_it(ours: Ours) -> None:
    ours.model.layers = ours.model.layers[3:]
    with pytest.raises(RuntimeError, match="no selection to reuse"):
        ours.all_logits([1, 2, 3])
