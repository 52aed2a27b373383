"""Under the grammar of calls every output is calls, and their arguments fit the tools' schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from glm52_engine.structured import GrammarCompiler, GrammarError, tool_calls
from glm52_engine.tokenizer import AnswerParser, Thinking, Tokenizer
from tests.engine.structured.support import accepts, babble

TOOLS: dict[str, dict[str, Any]] = {
    "book": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "days": {"type": "integer", "minimum": 1, "maximum": 30},
            "where": {"$ref": "#/$defs/place"},
            "kind": {"$ref": "#/$defs/kind"},
            "note": {"type": ["string", "null"], "maxLength": 4},
        },
        "required": ["city", "days", "where"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            },
            "kind": {"enum": ["a<b", "c", 3, None]},
        },
    },
    "now": {},
}

CALL = "<tool_call>book{}</tool_call>"
CITY = "<arg_key>city</arg_key><arg_value>Rome</arg_value>"
DAYS = "<arg_key>days</arg_key><arg_value>3</arg_value>"
WHERE = '<arg_key>where</arg_key>\n<arg_value>{"x": true}</arg_value>\n'


def calls_in(text: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = AnswerParser(Thinking.CLOSED, TOOLS)
    deltas = [parser.push(text), parser.flush()]
    names: list[str] = []
    arguments: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.calls):
        names += [] if call.name is None else [call.name]
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    found = [(name, json.loads(arguments[index])) for index, name in enumerate(names)]
    return "".join(delta.content for delta in deltas), found


async def test_every_output_is_calls_that_fit(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = await compiler.compile(tool_calls(TOOLS, tokenizer.id_of, text=False, several=True))
    seen = set()
    for seed in range(30):
        content, calls = calls_in(babble(grammar.matcher(), tokenizer, seed))
        assert content == ""
        assert calls
        for name, arguments in calls:
            jsonschema.validate(arguments, {"additionalProperties": False, **TOOLS[name]})
            seen.add(name)
    assert seen == set(TOOLS)


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        (CITY + DAYS + WHERE, True),
        ("\n" + CITY + DAYS + WHERE, True),
        (CITY + DAYS, False),
        (DAYS + CITY + WHERE, False),
        (CITY + DAYS.replace("3", '"3"') + WHERE, False),
        (CITY + DAYS.replace("3", "31") + WHERE, False),
        (CITY.replace("Rome", "Rome-Ostia") + DAYS + WHERE, False),
        (CITY.replace("Rome", "<b>") + DAYS + WHERE, True),
        (CITY + "<arg_key>code</arg_key><arg_value>IT</arg_value>" + DAYS + WHERE, True),
        (CITY + "<arg_key>code</arg_key><arg_value>it</arg_value>" + DAYS + WHERE, False),
        (CITY + DAYS + WHERE + "<arg_key>kind</arg_key><arg_value>a<b</arg_value>", True),
        (CITY + DAYS + WHERE + "<arg_key>kind</arg_key><arg_value>null</arg_value>", True),
        (CITY + DAYS + WHERE + "<arg_key>kind</arg_key><arg_value>x</arg_value>", False),
        (CITY + DAYS + WHERE + "<arg_key>other</arg_key><arg_value>x</arg_value>", False),
    ],
)
async def test_arguments(compiler: GrammarCompiler, tokenizer: Tokenizer, arguments: str, fits: bool) -> None:
    grammar = await compiler.compile(tool_calls(TOOLS, tokenizer.id_of, text=False, several=False))
    assert accepts(grammar.matcher(), tokenizer, CALL.format(arguments)) is fits


NOW = "<tool_call>now</tool_call>"


@pytest.mark.parametrize(
    ("text", "several", "fits", "others"),
    [
        (False, False, [NOW, NOW + "\n"], ["", "hello", NOW + NOW, "hi" + NOW]),
        (False, True, [NOW, NOW + NOW, NOW + "\n" + NOW], ["", "hello", NOW + "x"]),
        (True, False, ["hello", NOW, "hi\n" + NOW], [NOW + NOW, NOW + "x"]),
        (True, True, ["hello", NOW, "hi" + NOW + NOW], ["", NOW + "x", "<tool_call>no"]),
    ],
)
async def test_text_and_number_of_calls(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: bool, several: bool, fits: list[str], others: list[str]
) -> None:
    grammar = await compiler.compile(tool_calls(TOOLS, tokenizer.id_of, text=text, several=several))
    assert [accepts(grammar.matcher(), tokenizer, answer) for answer in fits] == [True] * len(fits)
    assert [accepts(grammar.matcher(), tokenizer, answer) for answer in others] == [False] * len(others)


async def test_json_or_calls(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = await compiler.compile(tool_calls(TOOLS, tokenizer.id_of, text=True, several=True, schema=schema))
    assert accepts(grammar.matcher(), tokenizer, '{"a": 1}')
    assert accepts(grammar.matcher(), tokenizer, NOW + NOW)
    assert not accepts(grammar.matcher(), tokenizer, "text")
    assert not accepts(grammar.matcher(), tokenizer, '{"a": 1}' + NOW)


@pytest.mark.parametrize(
    ("schema", "arguments", "fits"),
    [
        ({}, "<arg_key>a</arg_key><arg_value>1</arg_value>", False),
        ({"type": "object"}, "<arg_key>a</arg_key><arg_value>1</arg_value>", True),
        ({"type": "object", "additionalProperties": False}, "<arg_key>a</arg_key><arg_value>1</arg_value>", False),
        ({"properties": {"a": {}}}, "<arg_key>a</arg_key><arg_value>what ever</arg_value>", True),
        ({"properties": {"a": True}}, "<arg_key>a</arg_key><arg_value>what ever</arg_value>", True),
        ({"properties": {"a": {"type": "integer", "x-hint": 1}}}, "<arg_key>a</arg_key><arg_value>1</arg_value>", True),
        ({"properties": {'"é\n': {"const": 'x"'}}}, '<arg_key>"é\n</arg_key><arg_value>x"</arg_value>', True),
        ({"properties": {"a": {"$ref": "#/$defs/r"}}, "$defs": {"r": {"$ref": "#/$defs/r"}}}, "", True),
        ({"properties": [], "required": 7}, "", True),
    ],
)
async def test_odd_schemas(
    tiny_compiler: GrammarCompiler, tiny_tokenizer: Tokenizer, schema: Any, arguments: str, fits: bool
) -> None:
    grammar = await tiny_compiler.compile(tool_calls({"f": schema}, tiny_tokenizer.id_of, text=False, several=False))
    assert accepts(grammar.matcher(), tiny_tokenizer, f"<tool_call>f{arguments}</tool_call>") is fits


async def test_a_pattern_that_is_none_is_refused(tiny_compiler: GrammarCompiler, tiny_tokenizer: Tokenizer) -> None:
    tools = {"f": {"properties": {"a": {"type": "string", "pattern": "("}}}}
    with pytest.raises(GrammarError, match="regex"):
        await tiny_compiler.compile(tool_calls(tools, tiny_tokenizer.id_of, text=False, several=False))


async def test_a_vocabulary_without_the_marks_spells_them(
    tiny_compiler: GrammarCompiler, tiny_tokenizer: Tokenizer
) -> None:
    grammar = await tiny_compiler.compile(tool_calls(TOOLS, lambda mark: None, text=False, several=False))
    matcher = grammar.matcher()
    for token in NOW.encode():
        matcher.accept(token)
    assert accepts(matcher, tiny_tokenizer, "")
