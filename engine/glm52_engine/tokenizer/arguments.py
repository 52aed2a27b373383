"""Types of tool arguments. GLM writes values without a type; the tool's JSON schema says what they are."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

Schema = Mapping[str, Any]

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Models slip into Python where a schema leaves no doubt about what is meant."""

_MOST_SCHEMAS = 200
"""That are read for one argument: references to each other must end, and not grow on the way."""

_ESCAPES = re.compile(
    r"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""In JSON: a backslash, a surrogate pair, and (the group) half of one, which no client can encode."""


def argument_schema(parameters: Schema, name: str) -> Any:
    """The schema of one argument, True (anything) for one that is not declared."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return parameters.get("additionalProperties", True)


def allowed_types(schema: Any, root: Schema) -> frozenset[str]:
    """JSON types that `schema` admits; every type where it says nothing, or nothing that can be read."""
    return _allowed(schema, root, itertools.count())


def _allowed(schema: Any, root: Schema, read: Iterator[int]) -> frozenset[str]:
    if not isinstance(schema, Mapping) or next(read) > _MOST_SCHEMAS:
        return ALL_TYPES
    types = ALL_TYPES
    if "$ref" in schema:
        types &= _allowed(resolve(schema["$ref"], root), root, read)
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        types &= frozenset(name for name in named if isinstance(name, str))
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            types &= frozenset().union(*(_types_of(value) for value in values))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            types &= frozenset().union(*(_allowed(option, root, read) for option in schema[word]))
    for part in schema.get("allOf") or () if isinstance(schema.get("allOf"), list) else ():
        types &= _allowed(part, root, read)
    if schema.get("nullable") is True:  # OpenAPI's word
        types |= {"null"}
    return types or ALL_TYPES


def resolve(reference: Any, root: Schema) -> Any:
    """The schema behind a local reference (`#/$defs/x`); None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that the model wrote as `text`, for a schema that admits `types`.

    What is no JSON of an admitted type is a string: nothing that the model wrote is lost, and the client sees it.
    """
    if types != {"string"}:
        bare = text.strip()
        for candidate in (bare, _PYTHON_WORDS.get(bare)):
            if candidate is not None and _json_types(candidate) & types - {"string"}:
                return _ESCAPES.sub(lambda found: "\\ufffd" if found[1] else found[0], candidate)
    return json.dumps(text, ensure_ascii=False)


def _json_types(text: str) -> frozenset[str]:
    try:
        return _types_of(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return frozenset()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _types_of(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array" if isinstance(value, list) else "object"})
