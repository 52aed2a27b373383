"""Tool calls in text: typed, streamed, and never a word lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from glm52_engine.tokenizer import AnswerParser, Thinking
from glm52_engine.tokenizer.arguments import ALL_TYPES, allowed_types, to_json

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "scale": {"type": "number"},
            "now": {"type": "boolean"},
            "where": {"$ref": "#/$defs/place"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": ["string", "null"]},
        },
        "$defs": {"place": {"type": "object"}},
    },
    "now": {},
}


class Answer:
    """The sums of all deltas."""

    def __init__(self, pieces: list[str], thinking: Thinking = Thinking.CLOSED, tools: Any = TOOLS) -> None:
        parser = AnswerParser(thinking, tools)
        deltas = [*map(parser.push, pieces), parser.flush()]
        self.called = parser.called
        self.reasoning = "".join(delta.reasoning for delta in deltas)
        self.content = "".join(delta.content for delta in deltas)
        self.calls: list[tuple[str, str]] = []
        for call in (call for delta in deltas for call in delta.calls):
            if call.name is not None:
                assert call.index == len(self.calls)
                self.calls.append((call.name, ""))
            name, arguments = self.calls[call.index]
            self.calls[call.index] = name, arguments + call.arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        return repr(self.__dict__)


def call(name: str, /, **arguments: str) -> str:
    members = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
    return f"<tool_call>{name}{members}</tool_call>"


def arguments_of(text: str) -> Any:
    (found,) = Answer([text]).calls
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("city", "Köln", "Köln"),
        ("city", "001", "001"),
        ("city", "10", "10"),
        ("city", "null", "null"),
        ("city", '"quoted"', '"quoted"'),
        ("city", ' a <b> "c"\n\\ 😀\t', ' a <b> "c"\n\\ 😀\t'),
        ("city", "</arg_key><tool_call>", "</arg_key><tool_call>"),
        ("city", "", ""),
        ("days", "10", 10),
        ("days", " 10\n", 10),
        ("days", "ten", "ten"),
        ("days", "NaN", "NaN"),
        ("days", "1.5", "1.5"),
        ("scale", "1.50", 1.5),
        ("now", "true", True),
        ("now", "False", False),
        ("now", "1", "1"),
        ("tags", "[]", []),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("tags", "[" * 100_000, "[" * 100_000),
        ("tags", r'["\ud83d", "\uDE00 \\"]', ["\ufffd", "\ufffd \\"]),
        ("tags", r'["\ud83d\ude00", "\\ud83d"]', ["😀", r"\ud83d"]),
        ("where", '{"a": 1}', {"a": 1}),
        ("note", "null", None),
        ("note", "5", "5"),
        ("undeclared", "5", 5),
        ("undeclared", "five", "five"),
    ],
)
def test_values_have_the_schemas_type(key: str, written: str, expected: Any) -> None:
    found = arguments_of(call("weather", **{key: written}))
    assert found == {key: expected}
    assert type(found[key]) is type(expected)


def test_numbers_keep_every_digit() -> None:
    assert Answer([call("weather", days="1" * 30)]).calls == [("weather", '{"days": ' + "1" * 30 + "}")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<tool_call>now</tool_call>", "", [("now", "{}")]),
        ("<tool_call>now\n</tool_call>\n", "", [("now", "{}")]),
        (
            "Let me see.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>\n"
            "<tool_call>now\n</tool_call> done",
            "Let me see. done",
            [("weather", '{"city": "Rome"}'), ("now", "{}")],
        ),
        (call("nobody_knows", x="1", y="z"), "", [("nobody_knows", '{"x": 1, "y": "z"}')]),
        ("no call", "no call", []),
        ("  \n", "  \n", []),
        ("a <tool_call> b", "a <tool_call> b", []),
        ("<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
        ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("<tool_call>x y<tool_call>now</tool_call>", "<tool_call>x y", [("now", "{}")]),
        ("<tool_call>now", "<tool_call>now", []),
        ("<tool_call>now<arg_", "<tool_call>now<arg_", []),
        ("<tool_call>weather<arg_key>ci", "", [("weather", '{"ci')]),
        ("<tool_call>weather<arg_key>city</arg_key>", "", [("weather", '{"city"')]),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Ro", "", [("weather", '{"city": "Ro')]),
        ("<tool_call>weather<arg_key>days</arg_key><arg_value>1", "", [("weather", '{"days": 1')]),
        ("<tool_call>now<arg_key>a</arg_key>stray</tool_call>", "<arg_key>a</arg_key>stray", [("now", "{}")]),
        ("<tool_call>now<arg_key>a</tool_call>", "<arg_key>a", [("now", "{}")]),
        ("<tool_call>now<arg_key>a<arg_value>1</arg_value></tool_call>", "", [("now", '{"a": 1}')]),
        ("<tool_call>now<arg_key>" + "k" * 2000 + "</tool_call>", "<arg_key>" + "k" * 2000, [("now", "{}")]),
        ("<tool_call>" + " " * 50 + "now</tool_call>", "<tool_call>" + " " * 50 + "now</tool_call>", []),
        ("<tool_call>weather" + call("now"), "<tool_call>weather", [("now", "{}")]),
        (call("now", a="1")[: -len("</tool_call>")] + call("now"), "", [("now", '{"a": 1}'), ("now", "{}")]),
    ],
)
def test_calls_and_what_is_none(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    answer = Answer([text])
    assert (answer.content, answer.calls) == (content, calls)
    assert Answer(list(text)) == answer


def test_an_unfinished_call_is_told_apart() -> None:
    assert Answer([call("now")]).called
    assert not Answer([call("now") + "<tool_call>now<arg_key>"]).called
    assert not Answer(["text"]).called


def test_string_values_are_passed_on_while_they_are_written() -> None:
    parser = AnswerParser(Thinking.CLOSED, TOOLS)
    parser.push("<tool_call>weather<arg_key>city</arg_key><arg_value>")
    assert [c.arguments for c in parser.push('New "York').calls] == ['New \\"York']


def test_without_tools_marks_are_content() -> None:
    text = "a " + call("now")
    assert Answer([text], tools=None).content == text


def test_a_call_in_the_reasoning_is_reasoning() -> None:
    answer = Answer(["x" + call("now") + "</think>" + call("now")], Thinking.OPEN)
    assert (answer.reasoning, answer.content, answer.calls) == ("x" + call("now"), "", [("now", "{}")])


MARKS = [f"<{end}{name}>" for name in ("tool_call", "arg_key", "arg_value", "think") for end in ("", "/")]
WORDS = st.sampled_from([*MARKS, "weather", "now", "city", "days", "12", "a b", "é", '"', "\\", "\n", " ", "<", "</ar"])
NOT_LETTERS = {code: None for code in range(0x250) if chr(code) not in "BCDFGH"}


@given(
    words=st.lists(WORDS, max_size=25),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    thinking=st.sampled_from(Thinking),
)
@example(words=["a  ", call("now")], cuts=[2, 3], thinking=Thinking.CLOSED)
@settings(max_examples=300)
def test_the_pieces_borders_change_nothing(words: list[str], cuts: list[int], thinking: Thinking) -> None:
    text = "".join(words)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    whole = Answer([text], thinking)
    assert Answer(pieces, thinking) == whole
    assert Answer(list(text), thinking) == whole


@given(words=st.lists(st.sampled_from([*MARKS, *"BCDFGH"]), max_size=25))
@settings(max_examples=200)
def test_nothing_is_lost(words: list[str]) -> None:
    answer = Answer(["".join(words)])
    kept = answer.content + "".join(name + arguments for name, arguments in answer.calls)
    assert sorted(kept.translate(NOT_LETTERS)) == sorted(word for word in words if len(word) == 1)


@given(city=st.text().filter(lambda s: "</arg_value>" not in s), days=st.integers(), tags=st.lists(st.text()))
def test_what_the_template_writes_is_read_back(city: str, days: int, tags: list[str]) -> None:
    written = call("weather", city=city, days=json.dumps(days), tags=json.dumps(tags).replace("<", "\\u003c"))
    assert arguments_of(written) == {"city": city, "days": days, "tags": tags}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"enum": ["a", 1]}, {"string", "integer", "number"}),
        ({"const": None}, {"null"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
        ({"$ref": "#/$defs/growing"}, ALL_TYPES),
        ({"$ref": "#/$defs/0"}, ALL_TYPES),
        ({"$ref": "elsewhere"}, ALL_TYPES),
        ({"type": 7}, ALL_TYPES),
        ({"anyOf": []}, ALL_TYPES),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    root: dict[str, Any] = {"$defs": {"a/b": {"type": "boolean"}, "loop": {"$ref": "#/$defs/loop"}}}
    root["$defs"]["growing"] = {"anyOf": [{"$ref": "#/$defs/growing"}] * 9}
    root["$defs"] |= {str(i): {"anyOf": [{"allOf": [{"$ref": f"#/$defs/{i + 1}"}]}]} for i in range(900)}
    assert allowed_types(schema, root) == types


@given(text=st.text(), types=st.frozensets(st.sampled_from(sorted(ALL_TYPES)), min_size=1))
def test_every_value_becomes_json(text: str, types: frozenset[str]) -> None:
    json.loads(to_json(text, types))
