"""The messages of a chat request, checked one by one."""

from __future__ import annotations

from typing import Any

from glm52_engine.serve.errors import ApiError, bad
from glm52_engine.serve.fields import parse_text, wrong

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        raise bad("messages: missing, expected an array of messages", param="messages")
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "an array with at least one message")
    return tuple(_message(f"messages[{i}]", message) for i, message in enumerate(value))


def _message(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad_message(where, value, "an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise _bad_message(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": role}
    calls = _tool_calls(f"{where}.tool_calls", value.get("tool_calls")) if role == "assistant" else []
    message["content"] = _content(f"{where}.content", value.get("content"), optional=role == "assistant")
    if calls:
        message["tool_calls"] = calls
    # The answers' two names; what a client sends back is one of them, or both.
    reasoning = value.get("reasoning_content") or value.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    return message


def _content(where: str, value: Any, *, optional: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and optional:
        return ""
    if not isinstance(value, list) or not value:
        raise _bad_message(where, value, "a string or an array of text parts")
    return "".join(_part(f"{where}[{i}]", part) for i, part in enumerate(value))


def _part(where: str, value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "text":
        raise _bad_message(where, value, 'a part of type "text"; this model reads nothing else')
    if not isinstance(value.get("text"), str):
        raise _bad_message(f"{where}.text", value.get("text"), "a string")
    return str(value["text"])


def _tool_calls(where: str, value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _bad_message(where, value, "an array")
    return [_call(f"{where}[{i}]", call) for i, call in enumerate(value)]


def _call(where: str, call: Any) -> dict[str, Any]:
    """The call with its arguments as the object that templates iterate over."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad_message(f"{where}.function", function, "an object with name and arguments")
    where, text = f"{where}.function.arguments", function.get("arguments")
    if not isinstance(text, str | None):
        raise _bad_message(where, text, "a string of JSON")
    arguments = parse_text(where, text or "{}", "messages")
    if not isinstance(arguments, dict):
        raise _bad_message(where, text, "a string that holds a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _bad_message(where: str, value: Any, expected: str) -> Exception:
    error = wrong(where, value, expected)
    assert isinstance(error, ApiError)
    error.param = "messages"
    return error
