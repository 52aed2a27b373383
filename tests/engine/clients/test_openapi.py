"""schemathesis reads our own OpenAPI document and holds the server to it, with requests that fit and that do not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from glm52_engine.route.openapi import document

pytestmark = pytest.mark.processes

MODEL = "glm-5.2"
EXAMPLES = int(os.environ.get("GLM52_FUZZ_EXAMPLES", "10"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    unsupported_method,
    allow_header_conformance,
]


schema = schemathesis.openapi.from_dict(
    document(MODEL),
    config=SchemathesisConfig.from_dict({"generation": {"deterministic": True, "max-examples": EXAMPLES}}),
)


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_server_is_as_its_document_says(case: Any, server: str) -> None:
    if isinstance(case.body, dict):
        # Short answers: this is about the protocol, and the CPU is slow.
        for name in ("max_tokens", "max_completion_tokens"):
            case.body.pop(name, None)
        case.body["max_tokens"] = 2
        if isinstance(case.body.get("n"), int) and case.body["n"] > 2:
            case.body["n"] = 2
    case.call_and_validate(base_url=server, checks=CHECKS, timeout=60)


def test_the_document_is_the_served_one(server: str) -> None:
    assert requests.get(f"{server}/openapi.json", timeout=10).json() == document(MODEL)
