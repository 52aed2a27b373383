"""Reasoning is what the prompt's end says it is, wherever the text is cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.tokenizer import Thinking, Tokenizer, thinking_after
from glm52_engine.tokenizer.reasoning import ReasoningSplitter


def split(thinking: Thinking, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(thinking)
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (Thinking.OPEN, "why</think>42", ("why", "42")),
        (Thinking.OPEN, "</think>42", ("", "42")),
        (Thinking.OPEN, "never ends </thin", ("never ends </thin", "")),
        (Thinking.OPEN, "a</think>b</think>c", ("a", "b</think>c")),
        (Thinking.OPEN, "<tool_call>f</think>x", ("<tool_call>f", "x")),
        (Thinking.CLOSED, "a <think>b</think>", ("", "a <think>b</think>")),
        (Thinking.MAY_OPEN, "\n<think>why</think>42", ("why", "42")),
        (Thinking.MAY_OPEN, "a <think>b</think>", ("", "a <think>b</think>")),
        (Thinking.MAY_OPEN, "\n<thi", ("", "\n<thi")),
    ],
)
def test_split(thinking: Thinking, text: str, expected: tuple[str, str]) -> None:
    assert split(thinking, [text]) == expected
    assert split(thinking, list(text)) == expected


@given(
    thinking=st.sampled_from(Thinking),
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "/th", "ink>", "a", "\n", " ", ""])),
)
def test_the_pieces_borders_change_nothing(thinking: Thinking, pieces: list[str]) -> None:
    assert split(thinking, pieces) == split(thinking, ["".join(pieces)])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|user|>q<|assistant|><think>", Thinking.OPEN),
        ("<|user|>q<|assistant|><think>half a thought", Thinking.OPEN),
        ("<|user|>q<|assistant|></think>", Thinking.CLOSED),
        ("<|user|>q<|assistant|>\n<think></think>", Thinking.CLOSED),
        ("<|user|>q<|assistant|>\n", Thinking.MAY_OPEN),
        ("<|user|>what is <think>?<|assistant|>\n", Thinking.MAY_OPEN),
        ("<|user|>a</think>b<|assistant|><think>", Thinking.OPEN),
        ("no turns", Thinking.MAY_OPEN),
        ("", Thinking.MAY_OPEN),
    ],
)
def test_what_the_prompt_left_open(tiny_checkpoint: Path, prompt: str, expected: Thinking) -> None:
    tokenizer = Tokenizer.load(tiny_checkpoint)
    assert thinking_after(tokenizer.encode(prompt), tokenizer) is expected


def test_marks_stay_in_the_text_also_where_a_file_calls_them_special(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "m")
    raw = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["special"] = True
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer, text = Tokenizer.load(tmp_path / "m"), "</think><tool_call>f</tool_call>"
    assert tokenizer.decode(tokenizer.encode(text + "<|user|>")) == text


def test_the_variables_of_a_template(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "m")
    template = "{% set x = 1 %}{{ x }}{% if effort is defined %}{{ effort }}{% endif %}{{ tools }}"
    (tmp_path / "m" / "chat_template.jinja").write_text(template)
    assert {"effort", "tools"} <= Tokenizer.load(tmp_path / "m").template_variables
    assert "x" not in Tokenizer.load(tmp_path / "m").template_variables
