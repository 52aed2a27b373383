"""Our OpenAPI document: valid, and of one mind with the code that reads requests."""

from __future__ import annotations

import contextlib
from typing import Any

import jsonschema
import pytest

from glm52_engine.route.openapi import document
from glm52_engine.route.schemas import FUNCTION_NAME
from glm52_engine.serve.errors import ApiError
from glm52_engine.serve.openai import read_request
from glm52_engine.tokenizer import FUNCTION_NAME as PARSED_NAME

MODEL = "glm-5.2"
DOCUMENT = document(MODEL)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [each for item in value.values() for each in references(item)]
        return [each for item in value for each in references(item)] if isinstance(value, list) else []

    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    named = {reference.removeprefix("#/components/schemas/") for reference in references(DOCUMENT)}
    assert named == set(SCHEMAS)


@pytest.mark.parametrize(
    ("endpoint", "schema", "least"),
    [
        ("chat", "ChatRequest", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("completions", "CompletionRequest", {"prompt": "Hi"}),
    ],
)
def test_the_parser_knows_every_field_of_the_document(endpoint: Any, schema: str, least: dict[str, Any]) -> None:
    for name in SCHEMAS[schema]["properties"]:
        # A value that no field takes: one that is read is refused, one without effect is passed over.
        with contextlib.suppress(ApiError):
            asked = read_request(endpoint, {"model": MODEL, **least, name: [["not this"]]}, MODEL)
            assert asked.ignored == (), f"{name} is in the document, and nobody reads it"


def test_names_of_functions_are_those_that_the_parser_of_calls_finds() -> None:
    assert f"^{PARSED_NAME.pattern}$" == FUNCTION_NAME
