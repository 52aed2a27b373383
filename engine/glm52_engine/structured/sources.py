"""What a client may ask for → the text of a grammar that llguidance compiles. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance

from glm52_engine.structured.errors import GrammarError
from glm52_engine.structured.repeats import check_lark, check_pattern, check_schema

JSON_SPACE = r"[ ]{1,2}|\r?\n[ \t]{0,40}"
"""Between the parts of JSON: a line's end and an indent at most. A model that never ends its white space would fill the
whole output with it."""

MAX_GRAMMAR_CHARACTERS = 64 << 10
"""Of a grammar that a client writes: it is converted by Python, a character at a time."""


def json_object() -> str:
    return json_schema({"type": "object"})


def json_schema(schema: Any, *, space: str = JSON_SPACE) -> str:
    """`schema`: an object, or True for any JSON. Compiling refuses keywords that cannot be held."""
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise GrammarError(f"expected a JSON schema, that is an object, found {_shown(schema)}")
    check_schema(schema)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": space})
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not usable: {error}") from error


def regex(pattern: str) -> str:
    """The whole output matches `pattern` (syntax of Rust's regex crate: no look-around, no back-references)."""
    check_pattern(pattern)
    # Anchors say what holds anyway, and the library knows only those that begin and end a pattern.
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice(options: Sequence[str]) -> str:
    if not options:
        raise GrammarError("there is nothing to choose from")
    return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(option) for option in options))


def grammar(text: str) -> str:
    """`text`: a context-free grammar in Lark's form, or in GBNF with a rule `root`."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(f"it has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are read")
    check_lark(text)
    try:
        return llguidance.grammar_from("grammar", text)
    except Exception as error:  # the converter raises whatever it runs into
        raise GrammarError(str(error)) from error


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
