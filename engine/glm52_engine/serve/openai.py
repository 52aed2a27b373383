"""The client's own body → what to do, for chat and completions. Torch-free; prefill and decode share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from glm52_engine.serve.errors import ApiError, bad
from glm52_engine.serve.fields import Fields, wrong

Endpoint = Literal["chat", "completions"]

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat has none and may use the rest of the context."""

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")

_HARMLESS = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Known to OpenAI's clients, without effect on the tokens."""

_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "audio": lambda v: False,
    "best_of": lambda v: v == 1,
    "echo": lambda v: v is False,
    "frequency_penalty": lambda v: v == 0,
    "function_call": lambda v: v == "none",
    "functions": lambda v: v == [],
    "guided_json": lambda v: False,
    "guided_regex": lambda v: False,
    "logit_bias": lambda v: v == {},
    "logprobs": lambda v: v is False,
    "min_p": lambda v: v == 0,
    "min_tokens": lambda v: v == 0,
    "modalities": lambda v: v == ["text"],
    "n": lambda v: type(v) is int and v == 1,
    "parallel_tool_calls": lambda v: True,
    "prediction": lambda v: False,
    "presence_penalty": lambda v: v == 0,
    "reasoning_effort": lambda v: False,
    "repetition_penalty": lambda v: v == 1,
    "response_format": lambda v: v == {"type": "text"},
    "suffix": lambda v: v == "",
    "tool_choice": lambda v: v in ("none", "auto"),
    "tools": lambda v: v == [],
    "top_logprobs": lambda v: v == 0,
    "verbosity": lambda v: False,
    "web_search_options": lambda v: False,
}
"""Known, but with an effect that this server does not have; the predicate tells the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One valid request. Exactly one of messages and prompt is set."""

    endpoint: Endpoint
    model: str
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str | tuple[int, ...] = ""
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    template: dict[str, Any] = field(default_factory=dict)


def read_request(endpoint: Endpoint, body: Mapping[str, Any], model: str) -> Asked:
    """Raises ApiError: 400 naming the field, 404 for another model."""
    fields = Fields(body)
    _check_model(fields, model)
    chat = endpoint == "chat"
    stream = fields.flag("stream")
    asked = Asked(
        endpoint=endpoint,
        model=model,
        messages=_messages(fields.take("messages")) if chat else (),
        prompt="" if chat else _prompt(fields.take("prompt")),
        max_tokens=_max_tokens(fields, chat),
        temperature=_or(fields.number("temperature", 0, 2), 1.0),
        top_p=_or(fields.number("top_p", 0, 1, above_low=True), 1.0),
        top_k=max(0, fields.integer("top_k", -1, 2**31 - 1) or 0),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        stop=_stop(fields.take("stop")),
        stop_token_ids=frozenset(fields.integers("stop_token_ids")),
        ignore_eos=fields.flag("ignore_eos"),
        stream=stream,
        include_usage=_include_usage(fields, stream),
        return_token_ids=fields.flag("return_token_ids"),
        template=_template(fields) if chat else {},
    )
    _check_rest(fields)
    return asked


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _check_model(fields: Fields, model: str) -> None:
    asked = fields.text("model")
    if not asked:
        raise bad(f"model: missing, expected {model!r}", param="model")
    if asked != model:
        raise ApiError(
            404,
            f"the model {asked!r} does not exist here; this server has {model!r}",
            param="model",
            code="model_not_found",
        )


def _max_tokens(fields: Fields, chat: bool) -> int | None:
    # The upper bound is the context, which is checked when the prompt's length is known.
    old = fields.integer("max_tokens", 1, 2**31 - 1)
    new = fields.integer("max_completion_tokens", 1, 2**31 - 1) if chat else None
    if old is not None and new is not None and old != new:
        raise bad("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    asked = new if new is not None else old
    return asked if chat or asked is not None else COMPLETION_MAX_TOKENS


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.take("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise wrong("stream_options", options, "an object")
    if not stream:
        raise bad("stream_options: only allowed with stream: true", param="stream_options")
    inner = Fields(options)
    usage = inner.flag("include_usage")
    inner.take("include_obfuscation")
    if inner.rest():
        raise bad(f"stream_options.{inner.rest()[0]}: unknown field", param="stream_options")
    return usage


def _template(fields: Fields) -> dict[str, Any]:
    inner = Fields(fields.object("chat_template_kwargs"))
    thinking = inner.flag("enable_thinking", True)
    if inner.rest():
        raise bad(f"chat_template_kwargs.{inner.rest()[0]}: unknown field", param="chat_template_kwargs")
    return {} if thinking else {"enable_thinking": False}


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(_is_stop(s) for s in stops):
        raise wrong("stop", value, f"a string that is not empty, or an array of at most {MAX_STOPS} such strings")
    return tuple(stops)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_STOP_CHARACTERS


def _prompt(value: Any) -> str | tuple[int, ...]:
    expected = "a string or an array of token ids (one prompt in a request)"
    # OpenAI takes a batch of prompts; a batch of one is a prompt.
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if value is None:
        raise bad(f"prompt: missing, expected {expected}", param="prompt")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    raise wrong("prompt", value, expected + ", not empty")


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
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
    reasoning = value.get("reasoning_content")
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
    for i, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _bad_message(f"{where}[{i}].function", function, "an object with name and arguments")
        if not isinstance(function.get("arguments", ""), str):
            raise _bad_message(f"{where}[{i}].function.arguments", function["arguments"], "a string of JSON")
    return list(value)


def _bad_message(where: str, value: Any, expected: str) -> Exception:
    error = wrong(where, value, expected)
    assert isinstance(error, ApiError)
    error.param = "messages"
    return error


def _check_rest(fields: Fields) -> None:
    for name in fields.rest():
        value = fields.take(name)
        if name in _HARMLESS:
            continue
        if name not in _UNSUPPORTED:
            raise bad(f"{name}: unknown field", param=name, code="unknown_parameter")
        if not _UNSUPPORTED[name](value):
            raise bad(f"{name}: this server does not support it", param=name, code="unsupported_parameter")
