"""The router's OpenAPI document: what its public endpoints take and answer."""

from __future__ import annotations

import functools
from typing import Any

from glm52_engine import __version__
from glm52_engine.route.schemas import Schema, components, ref

_JSON = "application/json"

_ERRORS = {
    "400": "The body is not as it should be; `param` names the field.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too many requests wait already.",
    "500": "This server's own fault; its log has the reason.",
    "502": "A pod was lost in the middle of the request.",
    "503": "No pod is ready, or the server is going away.",
}
_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
_REQUEST_ID = {"x-request-id": {"description": "The client's own, or the answer's id.", "schema": {"type": "string"}}}
_ASKED_ID: Schema = {
    "name": "x-request-id",
    "in": "header",
    "required": False,
    "description": "Comes back in the answer and stands in every log line about it.",
    "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
}


@functools.cache
def document(model: str) -> dict[str, Any]:
    chat = _post("Chat", "ChatRequest", "ChatAnswer", streamed=True)
    completions = _post("Completion of a text", "CompletionRequest", "CompletionAnswer", streamed=True)
    return {
        "openapi": "3.1.0",
        "info": {"title": "glm52", "version": __version__, "description": "OpenAI's API, served by GLM-5.2."},
        "paths": {
            "/v1/chat/completions": {"post": chat},
            "/v1/completions": {"post": completions},
            "/v1/models": {"get": {"summary": "What is served", "responses": {"200": _answer("Models")}}},
            "/v1/models/{model}": {"get": _one_model(model)},
            "/tokenize": {"post": _post("Token ids of a text or a conversation", "TokenizeRequest", "Tokens")},
            "/detokenize": {"post": _post("The text of token ids", "DetokenizeRequest", "Text")},
        },
        "components": {"schemas": components(model)},
    }


def _one_model(model: str) -> Schema:
    parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
    responses = {"200": _answer("Model"), "404": _error("404")}
    return {"summary": "One model", "parameters": [parameter], "responses": responses}


def _post(summary: str, asked: str, answered: str, *, streamed: bool = False) -> Schema:
    content: Schema = {_JSON: {"schema": ref(answered)}}
    words = "The answer."
    if streamed:
        content["text/event-stream"] = {}
        words = (
            "The answer; with stream: true as events, each `data:` and one JSON chunk, and `data: [DONE]` at the end."
        )
    return {
        "summary": summary,
        "parameters": [_ASKED_ID],
        "requestBody": {"required": True, "content": {_JSON: {"schema": ref(asked)}}},
        "responses": {
            "200": {"description": words, "headers": _REQUEST_ID, "content": content},
            **{status: _error(status) for status in _ERRORS},
        },
    }


def _answer(name: str) -> Schema:
    return {"description": "The answer.", "content": {_JSON: {"schema": ref(name)}}}


def _error(status: str) -> Schema:
    headers = _RETRY if status in ("429", "503") else {}
    return {"description": _ERRORS[status], "headers": headers, "content": {_JSON: {"schema": ref("Error")}}}
