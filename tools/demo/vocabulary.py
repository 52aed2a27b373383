"""A byte-level BPE of the demo's own text."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, trainers

from glm52_engine.checkpoint.assets import SPECIAL_TOKENS, tokenizer_json


def learn_merges(texts: Iterable[str], count: int) -> list[tuple[str, str]]:
    """Pairs in the byte alphabet, most useful first; the same everywhere.

    `count` are learned. Those that spell a special token are left out: it would have the merge's id instead of its
    own, and no model would end where config.json says. Raises ValueError if there are fewer than `count`.
    """
    raw = tokenizer_json()
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    alphabet = sorted(raw["model"]["vocab"])
    trainer = trainers.BpeTrainer(vocab_size=256 + count, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    if len({left + right for left, right in merges}) != count:
        raise ValueError(f"found {len(merges)} merges with {count} wanted: ids behind them would be others")
    return [(left, right) for left, right in merges if left + right not in SPECIAL_TOKENS]


def tokenizer_of(merges: list[tuple[str, str]]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(merges)))
