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
from glm52_engine.model.indexer import Indexer
from glm52_engine.model.layer import Layer
from glm52_engine.model.moe import Moe, Router
from glm52_engine.model.rope import Rotation
from tests.engine.checkpoint.configs import random_config
from tests.engine.checkpoint.support import random_tensors, write
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


def no_mask_in_the_indexer(patch: Patch) -> None:
    patch.setattr(indexer, "_causal", lambda scores, positions: scores)


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


def key_norm_without_bias(patch: Patch) -> None:
    norm = torch.nn.functional.layer_norm
    patch.setattr(
        "torch.nn.functional.layer_norm", lambda x, shape, weight, bias, eps: norm(x, shape, weight, None, eps)
    )


def scores_without_relu(patch: Patch) -> None:
    def linear(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.einsum("sch,schl->scl", weights, torch.einsum("schd,sld->schl", query, keys.float()))

    patch.setattr(indexer, "index_scores", linear)


def rope_at_the_end_of_an_index_head(patch: Patch) -> None:
    def rotate_last(self: Any, x: torch.Tensor, by: Rotation) -> torch.Tensor:
        return torch.cat((x[..., : -self._rope], indexer.rotate(x[..., -self._rope :], by)), dim=-1)

    patch.setattr(Indexer, "_rotate_first", rotate_last)


def none_becomes_position_0(patch: Patch) -> None:
    locate = indexer.locate
    patch.setattr(indexer, "locate", lambda positions, step: locate(positions.clamp(min=0), step))


def scaled_shared_expert(patch: Patch) -> None:
    forward = Moe.forward

    def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) + 1.5 * self._shared.forward(x)

    patch.setattr(Moe, "forward", scaled)


@pytest.mark.parametrize(
    "mistake",
    [
        rope_of_the_indexer,
        rope_of_attention,
        no_correction_bias,
        bias_in_the_weights,
        selection_of_layer_0_everywhere,
        no_mask_in_the_indexer,
        mask_after_the_selection,
        key_norm_without_centring,
        key_norm_without_bias,
        scores_without_relu,
        rope_at_the_end_of_an_index_head,
        none_becomes_position_0,
        scaled_shared_expert,
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


@pytest.mark.parametrize(
    "misread",
    [
        {"rope_theta": 1e6},
        {"index_topk": 31},
        {"routed_scaling_factor": 1.0},
        {"norm_topk_prob": False},
        {"rms_norm_eps": 1e-2},
        {"num_experts_per_tok": 1},
    ],
    ids=lambda misread: next(iter(misread)),
)
def test_a_misread_field_is_noticed(tiny_checkpoint: Path, theirs: Theirs, misread: dict[str, Any]) -> None:
    ids = prompt(90)
    wrong = Ours(tiny_checkpoint, **misread).all_logits(ids)
    assert (wrong - theirs.all_logits(ids)).abs().max() > 100 * TOLERANCE


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four groups of experts, of which one is chosen, and biases that make every score negative."""
    config = random_config(0) | {"n_group": 4, "topk_group": 1, "n_routed_experts": 16, "num_experts_per_tok": 3}
    tensors = random_tensors(config)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] -= 3
    return write(tmp_path_factory.mktemp("grouped") / "m", config, tensors)


def test_groups_of_experts(grouped: Path, monkeypatch: Patch) -> None:
    ids = [token % 96 for token in prompt(20)]
    expected = Theirs(grouped).all_logits(ids)
    assert (Ours(grouped).all_logits(ids) - expected).abs().max() < TOLERANCE
    for misread in ({"n_group": 1, "topk_group": 1}, {"n_group": 2}, {"topk_group": 2}):
        assert (Ours(grouped, **misread).all_logits(ids) - expected).abs().max() > 100 * TOLERANCE, misread
    fill = torch.Tensor.masked_fill
    monkeypatch.setattr(torch.Tensor, "masked_fill", lambda self, mask, value: fill(self, mask, 0.0))
    assert (Ours(grouped).all_logits(ids) - expected).abs().max() > 100 * TOLERANCE, "0 wins over negative scores"


def test_the_eps_of_the_latent_norms(tmp_path: Path, monkeypatch: Patch) -> None:
    """With small latents it shows that theirs is 1e-6 and not rms_norm_eps."""
    config = random_config(0) | {"rms_norm_eps": 1e-5}
    tensors = random_tensors(config)
    for name in tensors:
        if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
            tensors[name] *= 3e-3
    checkpoint = write(tmp_path / "m", config, tensors)
    ids = [token % 96 for token in prompt(8)]
    expected = Theirs(checkpoint).all_logits(ids)
    assert (Ours(checkpoint).all_logits(ids) - expected).abs().max() < TOLERANCE
    monkeypatch.setattr(mla, "LATENT_NORM_EPS", 1e-5)
    assert (Ours(checkpoint).all_logits(ids) - expected).abs().max() > 100 * TOLERANCE


def test_indexer_mistakes_hide_below_k_tokens(tiny_checkpoint: Path, theirs: Theirs, monkeypatch: Patch) -> None:
    """Why every comparison here uses contexts longer than index_topk."""
    ids = prompt(32)
    rope_of_the_indexer(monkeypatch)
    assert (Ours(tiny_checkpoint).all_logits(ids) - theirs.all_logits(ids)).abs().max() < TOLERANCE


def test_a_shared_layer_needs_a_full_one_before_it(ours: Ours) -> None:
    ours.model.layers = ours.model.layers[3:]
    with pytest.raises(RuntimeError, match="no selection to reuse"):
        ours.all_logits([1, 2, 3])
