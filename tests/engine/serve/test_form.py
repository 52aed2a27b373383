"""Tools, tool_choice and the ways to ask for text that fits something: what is meant, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from glm52_engine.serve.errors import ApiError
from glm52_engine.serve.fields import Fields
from glm52_engine.serve.form import Form, read_form

F: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G: Any = {"type": "function", "function": {"name": "g"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def form(chat: bool = True, **body: Any) -> Form:
    return read_form(Fields(body), chat=chat)


def id_of(mark: str) -> int:
    return 300


def test_nothing_asked() -> None:
    assert form() == Form()
    assert form(tools=[], tool_choice="auto", response_format={"type": "text"}, parallel_tool_calls=True) == Form()
    assert form().field is None


def test_tools_are_shown_and_looked_for() -> None:
    found = form(tools=[F, G])
    assert found.tools == (F, G)
    assert found.schemas == {"f": {"type": "object"}, "g": {}}
    assert found.field is None, "without more wishes nothing needs a grammar"


def test_tool_choice_none_hides_them() -> None:
    assert form(tools=[F], tool_choice="none") == Form()


@pytest.mark.parametrize(
    ("body", "names", "must_call", "several"),
    [
        ({"tool_choice": "required"}, {"f", "g"}, True, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"f", "g"}, True, False),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, {"g"}, True, False),
        ({"parallel_tool_calls": False}, {"f", "g"}, False, False),
        ({"response_format": JSON_SCHEMA}, {"f", "g"}, False, True),
    ],
)
def test_what_the_grammar_lets_the_model_call(body: Any, names: set[str], must_call: bool, several: bool) -> None:
    found = form(tools=[F, G], **body)
    assert found.constrained is not None
    assert (set(found.constrained), found.must_call, found.several) == (names, must_call, several)
    assert found.schemas is not None
    assert set(found.schemas) == {"f", "g"}
    assert found.field == "tools"
    assert all(f'"{name}"' in found.source(id_of).replace("\\", "") for name in names)


def test_strict_tools_need_a_grammar() -> None:
    assert form(tools=[{**F, "function": {**F["function"], "strict": True}}, G]).field == "tools"


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", '"object"'),
        ({"response_format": JSON_SCHEMA}, "response_format", '"integer"'),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs", '"integer"'),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "structured_outputs", '"integer"'),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "structured_outputs", '"object"'),
        ({"structured_outputs": {"regex": "a+", "disable_any_whitespace": True}}, "structured_outputs", "a+"),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "structured_outputs", "x"),
        ({"structured_outputs": {"grammar": 'root ::= "z"'}}, "structured_outputs", "z"),
        ({"guided_json": SCHEMA}, "guided_json", '"integer"'),
        ({"guided_regex": "a+"}, "guided_regex", "a+"),
        ({"guided_choice": ["x"]}, "guided_choice", "x"),
        ({"guided_grammar": 'start: "z"'}, "guided_grammar", "z"),
    ],
)
@pytest.mark.parametrize("chat", [True, False])
def test_text_that_fits(body: Any, field: str, words: str, chat: bool) -> None:
    found = form(chat, **body)
    assert found.field == field
    assert words in found.source(id_of).replace("\\", "")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [F, F]}, "tools"),
        ({"tools": [F], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [F], "tool_choice": ["required"]}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": []}}, "response_format.type"),
        ({"response_format": {"json_schema": {}}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "tools": [F]}, "guided_regex"),
    ],
)
def test_refusals_name_the_field(body: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        form(**body)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert param.split("[")[0] in refused.value.message
