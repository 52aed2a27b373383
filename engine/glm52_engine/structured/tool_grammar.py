"""A grammar of GLM's tool calls, made from the tools' JSON schemas. Pure.

Marks are single tokens that no text can contain, so a value may hold anything but the mark's own letters. Strings stand
there as they are, everything else as JSON; arguments come in the order of the schema, the required ones always.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import llguidance

from glm52_engine.structured.repeats import check_schema
from glm52_engine.structured.sources import JSON_SPACE
from glm52_engine.tokenizer.arguments import allowed_types, resolve
from glm52_engine.tokenizer.marks import CALL, END_CALL, END_KEY, END_VALUE, KEY, VALUE

Tools = Mapping[str, Mapping[str, Any]]

_MAX_REFERENCES = 32

_SPACE = {"whitespace_pattern": JSON_SPACE}

_WORDS = {"null": "null", "true": "boolean", "false": "boolean"}


def tool_calls(
    tools: Tools, id_of: Callable[[str], int | None], *, text: bool, several: bool, schema: Any = None
) -> str:
    """`tools`: name → JSON schema of the parameters, at least one.

    `text`: the answer may be text, with calls behind it or without; else it is calls and nothing else. `several`: more
    than one call may be made. `schema`: of an answer that makes no call, which then is JSON.
    """
    for parameters in tools.values():
        check_schema(parameters)
    check_schema(schema)
    lark = _Lark(id_of).answer(tools, text=text, several=several, schema=schema)
    return llguidance.LLMatcher.grammar_from_lark(lark)


class _Lark:
    """Collects rules; a mark is its token where the vocabulary has one, and its letters where not."""

    def __init__(self, id_of: Callable[[str], int | None]) -> None:
        self._id_of = id_of
        self._rules: list[str] = []

    def answer(self, tools: Tools, *, text: bool, several: bool, schema: Any) -> str:
        names = [self._call(f"call{i}", name, parameters) for i, (name, parameters) in enumerate(tools.items())]
        start = "call+" if several else "call"
        if text and schema is not None:
            start = f"content | {start}"
            self._rules.append("content: %json " + json.dumps({"x-guidance": _SPACE, **schema}))
        elif text:
            start = f"CONTENT | CONTENT? {start}"
            self._rules.append(f"CONTENT: /(?s:.+)/ & {_without(CALL)}")
        return "\n".join([f"start: {start}", f"call: {' | '.join(names)}", *self._rules])

    def _mark(self, mark: str) -> str:
        token = self._id_of(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    def _call(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        parts = []
        for number, (key, value) in enumerate(properties.items()):
            argument = self._argument(f"{rule}a{number}", json.dumps(key), self._value(value, schema))
            parts.append(argument if key in required else argument + "?")
        if _takes_more(schema):
            self._rules.append(f"{rule.upper()}_KEY: /[^<>\\n]{{1,200}}/")
            parts.append(self._argument(f"{rule}more", f"{rule.upper()}_KEY", _text()) + "*")
        self._rules.append(
            f'{rule}: {self._mark(CALL)} {json.dumps(name)} "\\n"? {" ".join(parts)} {self._mark(END_CALL)} "\\n"?'
        )
        return rule

    def _argument(self, rule: str, key: str, value: str) -> str:
        # What the value is made of: a terminal of its own, or a JSON schema.
        body = value if value.startswith("%json") else rule.upper()
        if body is not value:
            self._rules.append(f"{rule.upper()}: {value}")
        self._rules.append(f"{rule}v: {body}")
        self._rules.append(
            f'{rule}: {self._mark(KEY)} {key} {self._mark(END_KEY)} "\\n"? '
            f'{self._mark(VALUE)} {rule}v {self._mark(END_VALUE)} "\\n"?'
        )
        return rule

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping) or set(schema) & {"enum", "const", "type"} or "$ref" not in schema:
                break
            schema = resolve(schema["$ref"], root)
        types = allowed_types(schema, root)
        if not isinstance(schema, Mapping) or "string" not in types:
            return _json(schema, root)
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(options, list):
            written = [option if isinstance(option, str) else json.dumps(option) for option in options]
            return " | ".join(json.dumps(option) for option in written)
        others = {word: name for word, name in _WORDS.items() if name in types}
        if types - {"string", *others.values()}:
            return _text()  # any text would be a string
        return " | ".join([_text(schema), *map(json.dumps, others)])


def _takes_more(schema: Mapping[str, Any]) -> bool:
    """Undeclared arguments: where the schema says so, or where it is an object and says nothing at all."""
    extra = schema.get("additionalProperties")
    if extra is None:
        return bool(schema) and not schema.get("properties")
    return extra is not False


def _json(schema: Any, root: Mapping[str, Any]) -> str:
    if not isinstance(schema, Mapping):
        return _text()
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    # Lenient: clients generate these schemas, often with keywords that are no more than documentation.
    options = {"x-guidance": {**_SPACE, "lenient": True}}
    return "%json " + json.dumps({**shared, **schema, **options})


def _text(schema: Mapping[str, Any] | None = None) -> str:
    """A terminal for a string as it is: of the schema's length and pattern, without the mark that ends it."""
    schema = schema or {}
    low, high = schema.get("minLength"), schema.get("maxLength")
    low = low if type(low) is int and low > 0 else 0
    limits = f"{{{low},{high}}}" if type(high) is int and high >= low else f"{{{low},}}" if low else "*"
    terminal = f"/(?s:.{limits})/ & {_without(END_VALUE)}"
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        before = "" if pattern.startswith("^") else "(?s:.*)"
        after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        bare = pattern.removeprefix("^").removesuffix("$") if not after else pattern.removeprefix("^")
        terminal += f" & /{llguidance.regex_to_lark(f'{before}(?:{bare}){after}', use_ascii='dw')}/"
    return terminal


def _without(mark: str) -> str:
    escaped = mark.replace("/", "\\/")
    return f"~/(?s:.*){escaped}(?s:.*)/"
