"""What a body says about the form of the answer: tools, and text that has to fit something. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glm52_engine.serve.errors import bad
from glm52_engine.serve.fields import Fields, parse_text, wrong
from glm52_engine.structured import GrammarError, sources, tool_calls
from glm52_engine.tokenizer import FUNCTION_NAME

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a function → JSON schema of its parameters."""

IdOf = Callable[[str], int | None]

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's names before structured_outputs."""

_WITHOUT_EFFECT = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class Text:
    """A grammar for the text of the answer. `field`: what asked for it; `schema`: the JSON schema, if it is one."""

    field: str
    source: str
    schema: Any = None


@dataclass(frozen=True, slots=True)
class Form:
    """`tools`: what the template shows. `schemas`: the functions whose calls are looked for in the answer, None for no
    calls at all. `constrained`: those that a grammar lets the model call, None for no such grammar; under it
    `must_call` admits nothing but calls, and `several` more than one."""

    tools: tuple[dict[str, Any], ...] = ()
    schemas: Schemas | None = None
    constrained: Schemas | None = None
    must_call: bool = False
    several: bool = True
    text: Text | None = None

    @property
    def field(self) -> str | None:
        """The field that asks for a grammar; None where anything may come."""
        if self.constrained is not None:
            return "tools"
        return None if self.text is None else self.text.field

    def source(self, id_of: IdOf) -> str:
        """The grammar, where there is one."""
        if self.constrained is None:
            return "" if self.text is None else self.text.source
        return tool_calls(
            self.constrained,
            id_of,
            text=not self.must_call,
            several=self.several,
            schema=None if self.text is None or self.must_call else self.text.schema,
        )


def read_form(fields: Fields, *, chat: bool) -> Form:
    """Raises ApiError 400 naming the field."""
    text = _text(fields)
    if not chat:
        return Form(text=text)
    tools = _tools(fields.take("tools"))
    several = fields.flag("parallel_tool_calls", True)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    choice, name = _tool_choice(fields.take("tool_choice"), schemas)
    if choice == "none" or not tools:
        # Not shown either: a model that sees tools calls them.
        return Form(text=text)
    if name is not None:
        return Form(tools, schemas, {name: schemas[name]}, must_call=True, several=False)
    must_call = choice == "required"
    strict = any(tool["function"].get("strict") for tool in tools)
    if text is not None and text.schema is None and not must_call:
        raise bad(f"{text.field}: together with tools only a JSON schema or json_object is possible", param=text.field)
    free = not (must_call or strict or text is not None) and several
    return Form(tools, schemas, None if free else schemas, must_call, several, text)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong("tools", value, "an array of tools")
    names: set[str] = set()
    for i, tool in enumerate(value):
        _check_tool(f"tools[{i}]", tool)
        name = tool["function"]["name"]
        if name in names:
            raise bad(f"tools[{i}].function.name: there are two functions {name!r}", param="tools")
        names.add(name)
    return tuple(value)


def _check_tool(where: str, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise wrong(where, tool, 'an object with type "function" and function')
    name = function.get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise wrong(f"{where}.function.name", name, "1 to 128 letters, digits or _ . : / -")
    for field, kind in (("parameters", dict), ("description", str), ("strict", bool)):
        if not isinstance(function.get(field), kind | None):
            words = {dict: "a JSON schema", str: "a string", bool: "true or false"}[kind]
            raise wrong(f"{where}.function.{field}", function[field], words)


def _tool_choice(value: Any, schemas: Schemas) -> tuple[str, str | None]:
    """none, auto, required or named; and the name."""
    if value is None or value in ("none", "auto"):
        return value or "auto", None
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if value != "required" and not isinstance(name, str):
        raise wrong(
            "tool_choice", value, '"none", "auto", "required", or {"type": "function", "function": {"name": …}}'
        )
    if not schemas:
        raise bad("tool_choice: there are no tools to choose from", param="tool_choice")
    if value == "required":
        return "required", None
    if name not in schemas:
        raise bad(f"tool_choice: there is no function {name!r} among the tools", param="tool_choice")
    return "named", name


def _text(fields: Fields) -> Text | None:
    asked = [text for text in (_response_format(fields), *_structured(fields)) if text is not None]
    if len(asked) > 1:
        raise bad(f"{asked[0].field} and {asked[1].field} both shape the text; give one of them", param=asked[1].field)
    return asked[0] if asked else None


def _response_format(fields: Fields) -> Text | None:
    value = fields.object("response_format")
    kind = value.get("type", "text" if not value else None)
    if kind == "text":
        return None
    if kind == "json_object":
        return _made("response_format", "json_object", True)
    if kind != "json_schema":
        raise wrong("response_format.type", kind, '"text", "json_object" or "json_schema"')
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise wrong("response_format.json_schema", inner, "an object with schema")
    return _made("response_format", "json", schema)


def _structured(fields: Fields) -> list[Text | None]:
    old = [_made(field, kind, value) for field, kind in _GUIDED.items() if (value := fields.take(field)) is not None]
    inner = Fields(fields.object("structured_outputs"))
    for name in _WITHOUT_EFFECT:
        inner.take(name)
    new = []
    for name in inner.rest():
        value = inner.take(name)
        if name not in ("json", "json_object", *_GUIDED.values()):
            raise bad(f"structured_outputs.{name}: this server does not support it", param="structured_outputs")
        new.append(_made("structured_outputs", name, value))
    return [*old, *new]


def _made(field: str, kind: str, value: Any) -> Text | None:
    try:
        if kind == "json_object":
            return Text(field, sources.json_object(), {"type": "object"}) if value is True else None
        if kind == "json":
            schema = parse_text(field, value, field) if isinstance(value, str) else value
            return Text(field, sources.json_schema(schema), {} if schema is True else schema)
        if kind == "choice":
            if not isinstance(value, list) or not all(isinstance(option, str) for option in value):
                raise wrong(field, value, "an array of strings")
            return Text(field, sources.choice(value))
        if not isinstance(value, str):
            raise wrong(field, value, "a string")
        return Text(field, sources.regex(value) if kind == "regex" else sources.grammar(value))
    except (GrammarError, RecursionError) as error:
        raise bad(f"{field}: {error}", param=field) from error
