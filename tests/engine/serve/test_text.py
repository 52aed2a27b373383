from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm52_engine.runtime.types import Logprobs, Token
from glm52_engine.serve.logprobs import Scores, chat_logprobs, completion_logprobs
from glm52_engine.serve.openai import Asked
from glm52_engine.serve.text import Piece, TextStream
from glm52_engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint)


def pieces(tokenizer: Tokenizer, ids: list[int], finish: str = "length", **asked: Any) -> list[Piece]:
    """What each token adds, up to the first with a finish reason."""
    stream = TextStream(Asked("completions", "m", **asked), tokenizer)
    found = []
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        found.append(stream.push(Token(token, index, finish if last else None)))  # type: ignore[arg-type]
        if found[-1].finish:
            break
    assert stream.tokens == len(found)
    return found


def collect(tokenizer: Tokenizer, ids: list[int], *stop: str, **more: Any) -> tuple[str, str | None, int]:
    found = pieces(tokenizer, ids, stop=stop, **more)
    return "".join(piece.text for piece in found), found[-1].finish, len(found)


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


FAMILY = "👩‍👩‍👧 ďábelské 客单价 नमस्ते"


def test_a_stop_string_right_behind_a_character_of_many_bytes(tokenizer: Tokenizer) -> None:
    ids = list(f"{FAMILY}👧ENDé".encode())
    assert collect(tokenizer, ids, "END")[:2] == (f"{FAMILY}👧", "stop")
    assert collect(tokenizer, ids, "👧E", include_stop=True)[:2] == (f"{FAMILY}👧E", "stop")


@pytest.mark.parametrize("cut", range(1, len(FAMILY.encode())))
def test_a_text_cut_off_anywhere_ends_with_at_most_one_broken_character(tokenizer: Tokenizer, cut: int) -> None:
    data = FAMILY.encode()[:cut]
    text, _, _ = collect(tokenizer, list(data))
    assert text == data.decode("utf-8", "replace")
    assert "\ufffd" not in text[:-1]


def test_two_outputs_by_turns_share_nothing(tokenizer: Tokenizer) -> None:
    streams = [TextStream(Asked("chat", "m"), tokenizer) for _ in range(2)]
    texts = ["", ""]
    for index, (a, b) in enumerate(zip("é€".encode(), "€é".encode(), strict=True)):
        for place, byte in enumerate((a, b)):
            texts[place] += streams[place].push(Token(byte, index)).text
    assert texts == ["é€", "€é"]


def test_why_it_stopped(tokenizer: Tokenizer) -> None:
    end = min(tokenizer.eos_ids)
    assert pieces(tokenizer, [72, end], finish="stop")[-1].stop_reason is None
    assert pieces(tokenizer, [72, 73], finish="stop", stop_token_ids=frozenset({73}))[-1].stop_reason == 73
    assert pieces(tokenizer, list(b"one two"), stop=("e t",))[-1].stop_reason == "e t"
    assert pieces(tokenizer, list(b"one"))[-1].stop_reason is None


def test_stops_that_are_kept(tokenizer: Tokenizer) -> None:
    named = frozenset({ord("!")})
    assert collect(tokenizer, list(b"Hi!"), finish="stop", stop_token_ids=named)[0] == "Hi"
    assert collect(tokenizer, list(b"Hi!"), finish="stop", stop_token_ids=named, include_stop=True)[0] == "Hi!"
    assert collect(tokenizer, list(b"one two three"), " tw", include_stop=True)[0] == "one tw"
    # The end of the model's own is special: no text either way, unless that is asked for.
    ids = [*b"Hi", min(tokenizer.eos_ids)]
    assert collect(tokenizer, ids, finish="stop", include_stop=True)[0] == "Hi"
    shown = collect(tokenizer, ids, finish="stop", include_stop=True, skip_special=False)[0]
    assert shown.startswith("Hi<|")


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    ids = list(b"ab ab ab")
    assert collect(tokenizer, ids, "ab") == ("", "stop", 2)
    assert collect(tokenizer, ids, "ab", min_tokens=2) == ("ab ", "stop", 5)
    assert collect(tokenizer, ids, "ab", min_tokens=4) == ("ab ", "stop", 5), "begun before, complete after"
    assert collect(tokenizer, ids, "ab", min_tokens=8) == ("ab ab ab", "length", 8)


def test_each_token_s_place_in_the_text(tokenizer: Tokenizer) -> None:
    found = pieces(tokenizer, list("aé€b".encode()))
    assert [piece.offset for piece in found] == [0, 1, 1, 2, 2, 2, 3]
    assert [piece.text for piece in found] == ["a", "", "é", "", "", "€", "b"]


@given(data=st.lists(st.integers(0, 255), min_size=1, max_size=12))
def test_log_probabilities_carry_every_byte(tokenizer: Tokenizer, data: list[int]) -> None:
    scores = [Scores.of(token, Logprobs(-1.0, ((token, -1.0), (0x80, -2.0))), tokenizer) for token in data]
    entries = chat_logprobs(scores)["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == bytes(data)
    assert all(entry["token"] in [top["token"] for top in entry["top_logprobs"]] for entry in entries)
    legacy = completion_logprobs(scores, [0] * len(scores))
    assert [top[token] for top, token in zip(legacy["top_logprobs"], legacy["tokens"], strict=True)] == [-1.0] * len(
        data
    )
    assert all("\ufffd" not in token for token in legacy["tokens"]), "halves of characters stay apart"
