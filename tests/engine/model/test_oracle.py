"""What the published model code does, at the version that is compared with: it has changed over time."""

from __future__ import annotations

import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import torch

from glm52_engine.checkpoint import load_weights, read_model_spec
from tests.engine.model.support import Theirs, prompt

PIN = Path(__file__).parents[3] / "requirements/dev.in"


def test_the_version_is_the_pinned_one() -> None:
    pinned = re.search(r"^transformers==(\S+)$", PIN.read_text(), re.MULTILINE)
    assert pinned
    assert version("transformers") == pinned[1]


def test_its_indexer_rotates_neighbouring_pairs(tiny_checkpoint: Path, theirs: Theirs) -> None:
    """Scores of the first layer, written out: they agree with pairs (0, 1), (2, 3), … and with no other pairing."""
    ids = prompt(70)
    theirs.all_logits(ids)
    seen = theirs.scores[0].tril()
    assert torch.allclose(first_scores(tiny_checkpoint, ids, interleaved=True), seen, rtol=1e-4, atol=1e-4)
    other = first_scores(tiny_checkpoint, ids, interleaved=False)
    assert (other - seen).abs().max() > 0.1 * seen.std()


def test_its_indexer_ignores_the_flag(tiny_checkpoint: Path, theirs: Theirs, tmp_path: Path) -> None:
    """`indexer_rope_interleave` has no effect there; here a file that says false is refused."""
    shutil.copytree(tiny_checkpoint, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"indexer_rope_interleave": False}))
    ids = prompt(70)
    assert torch.equal(Theirs(tmp_path / "m").all_logits(ids), theirs.all_logits(ids))


def first_scores(checkpoint: Path, ids: list[int], *, interleaved: bool) -> torch.Tensor:
    """float32 [T, T], lower triangle: index scores of layer 0, with nothing but torch and the weights."""
    spec = read_model_spec(checkpoint)
    weights = load_weights(checkpoint, spec).tensors
    layer = {
        name.removeprefix("model.layers.0."): value
        for name, value in weights.items()
        if name.startswith("model.layers.0.")
    }

    def rms(x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * layer[name]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        width = spec.qk_rope_head_dim
        head, rest = x[..., :width], x[..., width:]
        frequency = spec.rope_theta ** -(torch.arange(0, width, 2) / width)
        angle = torch.arange(len(ids)).view(-1, *[1] * (x.dim() - 1)) * frequency
        turn = torch.polar(torch.ones_like(angle), angle)
        if interleaved:
            pairs = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous())
            return torch.cat((torch.view_as_real(pairs * turn).flatten(-2), rest), -1)
        pairs = torch.complex(*head.chunk(2, dim=-1)) * turn
        return torch.cat((pairs.real, pairs.imag, rest), -1)

    hidden = rms(weights["model.embed_tokens.weight"][ids], "input_layernorm.weight", spec.rms_norm_eps)
    latent = rms(hidden @ layer["self_attn.q_a_proj.weight"].T, "self_attn.q_a_layernorm.weight", 1e-6)
    query = (latent @ layer["self_attn.indexer.wq_b.weight"].T).unflatten(-1, (spec.index_n_heads, -1))
    key = torch.nn.functional.layer_norm(
        hidden @ layer["self_attn.indexer.wk.weight"].T,
        (spec.index_head_dim,),
        layer["self_attn.indexer.k_norm.weight"],
        layer["self_attn.indexer.k_norm.bias"],
        1e-6,
    )
    per_head = torch.einsum("thd,sd->ths", rotated(query), rotated(key)).relu() * spec.index_head_dim**-0.5
    share = hidden @ layer["self_attn.indexer.weights_proj.weight"].T * spec.index_n_heads**-0.5
    return torch.einsum("th,ths->ts", share, per_head).tril()
