"""Outputs of a model that knows nothing: every step draws any token that the grammar allows."""

from __future__ import annotations

import json
import random
from pathlib import Path

import tokenizers

from glm52_engine.checkpoint.assets import EOS_TOKENS, SPECIAL_TOKENS, tokenizer_json
from glm52_engine.structured import Matcher
from glm52_engine.tokenizer import Tokenizer


class TooLong(Exception):
    """The output did not end by itself."""


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.mask()
    return [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]


def babble(matcher: Matcher, tokenizer: Tokenizer, seed: int, limit: int = 4000) -> str:
    """The text of one output, up to its end."""
    rng, text = random.Random(seed), tokenizer.detokenizer()
    pieces = []
    for _ in range(limit):
        token = rng.choice(allowed(matcher))
        matcher.accept(token)
        if token in tokenizer.eos_ids:
            return "".join(pieces)
        pieces.append(text.push(token))
    raise TooLong("".join(pieces))


def accepts(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether `text` is a whole output."""
    for token in tokenizer.encode(text):
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    return tokenizer.eos_ids <= set(allowed(matcher))


def merged_tokenizer(folder: Path) -> Path:
    """A checkpoint's tokenizer files with merges, as GLM's has: one token may hold the end of one part of JSON and the
    beginning of the next."""
    raw = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json()))
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    bare.pre_tokenizer, bare.decoder = raw.pre_tokenizer, raw.decoder
    corpus = [json.dumps([{"name": f"n {i}", "tags": ["x", "yy"], "ok": True, "n": i}] * 3) for i in range(200)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    bare.train_from_iterator(corpus, trainer)
    kept = SPECIAL_TOKENS.index("/nothink")
    bare.add_special_tokens(list(SPECIAL_TOKENS[:kept]))
    bare.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL_TOKENS[kept:]])
    folder.mkdir()
    bare.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("")
    ends = {"eos_token_id": [bare.token_to_id(token) for token in EOS_TOKENS]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder
