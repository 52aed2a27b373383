"""What the presets are made of: trained weights are those of their recipe, and every part fits the others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from glm52_engine.checkpoint import make_checkpoint
from glm52_engine.checkpoint.assets import EOS_TOKENS, MERGES, RECIPE, SPECIAL_TOKENS, WEIGHTS, special_token_id
from glm52_engine.checkpoint.trained import DEMO, trained_merges, trained_weights
from glm52_engine.config import ConfigError, Preset
from glm52_engine.tokenizer import Tokenizer


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path / "demo")
    return tmp_path / "demo"


@pytest.mark.parametrize("preset", get_args(Preset))
def test_every_preset_ends_where_its_tokenizer_says(preset: str, tmp_path: Path) -> None:
    make_checkpoint(preset, tmp_path / preset)
    tokenizer = Tokenizer.load(tmp_path / preset)
    # A merge that spells a special token would have its id, and no answer would ever end.
    assert {tokenizer.id_of(token) for token in EOS_TOKENS} == tokenizer.eos_ids
    merges = trained_merges(DEMO) if preset == "demo" else []
    expected = [special_token_id(token, len(merges)) for token in SPECIAL_TOKENS]
    assert [tokenizer.id_of(token) for token in SPECIAL_TOKENS] == expected


def test_the_trained_weights_are_kept_to_the_bit(demo_checkpoint: Path) -> None:
    kept, made = load_file(DEMO / WEIGHTS), load_file(demo_checkpoint / WEIGHTS)
    assert kept.keys() == made.keys()
    assert {tensor.dtype for tensor in made.values()} == {torch.float32}
    assert all(torch.equal(kept[name].float(), made[name]) for name in kept)


@pytest.mark.parametrize(("name", "read"), [(WEIGHTS, trained_weights), (MERGES, trained_merges)])
def test_other_bytes_than_the_recipes_are_refused(damaged: Path, name: str, read: object) -> None:
    assert callable(read)
    content = bytearray((damaged / name).read_bytes())
    content[-3] ^= 1
    (damaged / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"demo/{name}: found SHA-256 \w+; expected \w+ .*install glm52-engine again"
    ):
        read(damaged)


@pytest.mark.parametrize("recipe", [None, "", "[]", "{}", '{"sha256": "x"}', '{"sha256": {}}'])
def test_without_a_hash_nothing_is_trusted(damaged: Path, recipe: str | None) -> None:
    (damaged / RECIPE).unlink()
    if recipe is not None:
        (damaged / RECIPE).write_text(recipe)
    with pytest.raises(ConfigError, match=rf"demo/{WEIGHTS}: cannot be checked"):
        trained_weights(damaged)
