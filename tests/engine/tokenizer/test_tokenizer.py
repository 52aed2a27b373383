"""Text ↔ ids, streaming without broken characters, and the chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.checkpoint import make_checkpoint
from glm52_engine.config import ConfigError
from glm52_engine.tokenizer import TemplateError, Tokenizer, decodable_bound, eos_token_ids


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint)


@given(text=st.text())
def test_decode_inverts_encode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@given(text=st.text(alphabet="aé€😀\n"))
def test_a_stream_never_splits_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.detokenizer()
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.flush() == ""


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert [stream.push(token) for token in "€".encode()[:2]] == ["", ""]
    assert stream.flush() == "�"


def test_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("[gMASK]<sop><|user|>hi<think>x</think>")
    assert tokenizer.decode(ids) == "hi<think>x</think>", "markup that parsers look for stays in the text"
    assert tokenizer.decode(ids, skip_special=False) == "[gMASK]<sop><|user|>hi<think>x</think>"
    assert len(ids) == 3 + 2 + 3


def test_same_ids_and_text_as_transformers(tiny_checkpoint: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(tiny_checkpoint)
    messages = [{"role": "user", "content": "héllo 123456, it's"}]
    prompt = tokenizer.render_chat(messages)
    assert prompt == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(prompt) == theirs(prompt, add_special_tokens=False)["input_ids"]


def test_ends_and_bound(tiny_checkpoint: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == eos_token_ids(tiny_checkpoint)
    assert len(tokenizer.eos_ids) == 3
    vocab_size = json.loads((tiny_checkpoint / "config.json").read_text())["vocab_size"]
    assert tokenizer.vocab_bound == decodable_bound(tiny_checkpoint) < vocab_size
    with pytest.raises(ValueError, match="not in the tokenizer's vocabulary"):
        tokenizer.decode([tokenizer.vocab_bound])


def test_chat(tokenizer: Tokenizer) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"city": "Köln", "n": 2}'}}]
    prompt = tokenizer.render_chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "<b>"}]},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "r1"},
            {"role": "tool", "content": "r2"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        enable_thinking=False,
    )
    assert prompt.startswith("[gMASK]<sop><|system|>\n# Tools")
    assert '{"type": "function", "function": {"name": "f"}}' in prompt
    assert "<|system|>\nBe brief.<|user|>\na<b><|assistant|>\n<think></think><tool_call>f" in prompt
    assert "<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>n</arg_key><arg_value>2</arg_value>" in prompt
    assert prompt.endswith(
        "<|observation|><tool_response>r1</tool_response><tool_response>r2</tool_response>"
        "<|assistant|>\n<think></think>"
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "wizard", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        {"role": "assistant", "content": "", "tool_calls": [{}]},
    ],
)
def test_messages_that_do_not_fit(tokenizer: Tokenizer, message: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="do not fit the chat template"):
        tokenizer.render_chat([message])


def test_the_template_cannot_reach_python(tmp_path: Path) -> None:
    make_checkpoint("tiny", tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(TemplateError):
        Tokenizer.load(tmp_path / "m").render_chat([])


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", None, "cannot be read"),
        ("tokenizer.json", "{", "decoder: missing"),
        ("tokenizer.json", '{"decoder": {"type": "WordPiece"}}', "found 'WordPiece'; expected 'ByteLevel'"),
        ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}}', "no usable tokenizer"),
        ("chat_template.jinja", "{% if %}", "line 1"),
        ("chat_template.jinja", None, "cannot be read"),
        ("generation_config.json", "{}", "eos_token_id: missing"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id: found 'x'"),
    ],
)
def test_bad_files_are_named(tiny_checkpoint: Path, tmp_path: Path, file: str, text: str | None, message: str) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "m")
    (tmp_path / "m" / file).unlink()
    if text is not None:
        (tmp_path / "m" / file).write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        Tokenizer.load(tmp_path / "m")
    assert str(tmp_path / "m" / file) in str(refused.value)
