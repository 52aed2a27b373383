from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm52_engine.runtime.types import Token
from glm52_engine.serve.openai import Asked
from glm52_engine.serve.text import TextStream
from glm52_engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint)


def collect(tokenizer: Tokenizer, ids: list[int], *stop: str, finish: str = "length") -> tuple[str, str | None, int]:
    stream = TextStream(Asked("completions", "m", stop=stop), tokenizer)
    text, reason = "", None
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        piece = stream.push(Token(token, index, finish if last else None))  # type: ignore[arg-type]
        text, reason = text + piece.text, piece.finish
        if reason:
            break
    return text, reason, stream.tokens


def test_characters_across_tokens_are_whole(tokenizer: Tokenizer) -> None:
    text = "👩‍👩‍👧 ďábelské 客单价 नमस्ते"
    ids = list(text.encode())
    assert collect(tokenizer, ids) == (text, "length", len(ids))


def test_a_cut_character_becomes_one_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    assert collect(tokenizer, list("é".encode())[:1])[0] == "\ufffd"


def test_the_token_that_stops_is_no_text(tokenizer: Tokenizer) -> None:
    assert collect(tokenizer, [*list(b"Hi"), min(tokenizer.eos_ids)], finish="stop") == ("Hi", "stop", 3)


def test_a_stop_string_across_tokens_cuts_and_ends(tokenizer: Tokenizer) -> None:
    assert collect(tokenizer, list(b"one two three"), " tw") == ("one", "stop", 6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.text(max_size=12))
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    ids = list(text.encode())
    if ids:
        assert collect(tokenizer, ids)[0] == text
