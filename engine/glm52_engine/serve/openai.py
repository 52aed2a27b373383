"""The client's own body → what to do, for chat and completions. Torch-free; prefill and decode share it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from glm52_engine.serve.errors import ApiError, bad
from glm52_engine.serve.fields import Fields, wrong
from glm52_engine.serve.form import Form, read_form
from glm52_engine.serve.limits import (
    MAX_CHOICES,
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MOST,
    REPETITION_PENALTY,
    Endpoint,
)
from glm52_engine.serve.messages import read_messages

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat has none and may use the rest of the context."""


_HARMLESS = frozenset(
    {
        "add_special_tokens",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Known to OpenAI's and vLLM's clients, without effect on the tokens here."""

_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "add_generation_prompt": lambda v: v is True,
    "allowed_token_ids": lambda v: False,
    "audio": lambda v: False,
    "bad_words": lambda v: v == [],
    "chat_template": lambda v: False,
    "continue_final_message": lambda v: v is False,
    "documents": lambda v: v == [],
    "echo": lambda v: v is False,
    "function_call": lambda v: v == "none",
    "functions": lambda v: v == [],
    "length_penalty": lambda v: v == 1,
    "modalities": lambda v: v == ["text"],
    "parallel_tool_calls": lambda v: True,
    "prediction": lambda v: False,
    "prompt_embeds": lambda v: False,
    "prompt_logprobs": lambda v: False,
    "reasoning_effort": lambda v: False,
    "return_tokens_as_token_ids": lambda v: v is False,
    "suffix": lambda v: v == "",
    "tool_choice": lambda v: v in ("none", "auto"),
    "tools": lambda v: v == [],
    "truncate_prompt_tokens": lambda v: False,
    "use_beam_search": lambda v: v is False,
    "verbosity": lambda v: False,
    "web_search_options": lambda v: False,
}
"""Known, but with an effect that this server does not have; the predicate tells the values that ask for nothing.

Tools and reasoning_effort are among them for completions: chat has read them before."""

_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
"""Of the chat template, from other fields."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One valid request; the fields that the engine's `Sampling` has too mean the same here.

    `logprobs`: how many alternatives to each token, None for no log probabilities at all. `ignored`: fields of the
    body that nobody knows, which is no error, as in vLLM.
    """

    endpoint: Endpoint
    model: str
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str | tuple[int, ...] = ""
    echo: bool = False
    n: int = 1
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    """Under which of its two names the client gave it."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special: bool = True
    logprobs: int | None = None
    stream: bool = False
    include_usage: bool = False
    usage_in_chunks: bool = False
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: str = ""
    template: dict[str, Any] = field(default_factory=dict)
    form: Form = field(default_factory=Form)
    ignored: tuple[str, ...] = ()

    @property
    def prompt_field(self) -> str:
        return "messages" if self.endpoint == "chat" else "prompt"


def read_request(endpoint: Endpoint, body: Mapping[str, Any], model: str) -> Asked:
    """Raises ApiError: 400 naming the field, 404 for another model."""
    fields = Fields(body)
    check_model(fields, model)
    chat = endpoint == "chat"
    stream = fields.flag("stream")
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    _check_best_of(fields, chat, n)
    logprobs = _chat_logprobs(fields) if chat else fields.integer("logprobs", 0, MAX_LOGPROBS)
    include_usage, usage_in_chunks = _stream_options(fields, stream)
    max_tokens, max_tokens_field = _max_tokens(fields, chat)
    return Asked(
        endpoint=endpoint,
        model=model,
        messages=read_messages(fields.take("messages")) if chat else (),
        prompt="" if chat else _prompt(fields.take("prompt")),
        echo=False if chat else _echo(fields, logprobs),
        n=n,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        min_tokens=fields.integer("min_tokens", 0, MOST) or 0,
        temperature=_or(fields.number("temperature", 0, 2), 1.0),
        top_p=_or(fields.number("top_p", 0, 1, above_low=True), 1.0),
        top_k=max(0, fields.integer("top_k", -1, MOST) or 0),
        min_p=_or(fields.number("min_p", 0, 1), 0.0),
        presence_penalty=_or(fields.number("presence_penalty", -2, 2), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", -2, 2), 0.0),
        repetition_penalty=_or(fields.number("repetition_penalty", *REPETITION_PENALTY), 1.0),
        logit_bias=_logit_bias(fields),
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        stop=_stop(fields.take("stop")),
        include_stop=fields.flag("include_stop_str_in_output"),
        stop_token_ids=frozenset(fields.integers("stop_token_ids", most=MAX_LISTED_TOKENS)),
        ignore_eos=fields.flag("ignore_eos"),
        skip_special=fields.flag("skip_special_tokens", True),
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        usage_in_chunks=usage_in_chunks,
        return_token_ids=fields.flag("return_token_ids"),
        priority=fields.integer("priority", -MOST, MOST) or 0,
        cache_salt=fields.text("cache_salt") or "",
        template=template_variables(fields) if chat else {},
        form=read_form(fields, chat=chat),
        ignored=_check_rest(fields),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def check_model(fields: Fields, model: str) -> None:
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


def _max_tokens(fields: Fields, chat: bool) -> tuple[int | None, str]:
    """The limit and the name of its field."""
    # The upper bound is the context, which is checked when the prompt's length is known.
    old = fields.integer("max_tokens", 1, MOST)
    new = fields.integer("max_completion_tokens", 1, MOST) if chat else None
    if old is not None and new is not None and old != new:
        raise bad("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    if new is not None:
        return new, "max_completion_tokens"
    return old if chat or old is not None else COMPLETION_MAX_TOKENS, "max_tokens"


def _check_best_of(fields: Fields, chat: bool, n: int) -> None:
    best_of = None if chat else fields.integer("best_of", 1, MAX_CHOICES)
    if best_of not in (None, n):
        raise bad(f"best_of: found {best_of}; this server returns every choice, n = {n}", param="best_of")


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS) or 0
    if top and not wanted:
        raise bad("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
    return top if wanted else None


def _echo(fields: Fields, logprobs: int | None) -> bool:
    echo = fields.flag("echo")
    if echo and logprobs is not None:
        raise bad(
            "echo: not together with logprobs, since no log probabilities of prompts are computed here",
            param="echo",
            code="unsupported_parameter",
        )
    return echo


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Usage at the end, and in every chunk."""
    options = fields.take("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise wrong("stream_options", options, "an object")
    if not stream:
        raise bad("stream_options: only allowed with stream: true", param="stream_options")
    inner = Fields(options)
    usage = inner.flag("include_usage")
    in_chunks = inner.flag("continuous_usage_stats")
    inner.take("include_obfuscation")
    if inner.rest():
        raise bad(f"stream_options.{inner.rest()[0]}: unknown field", param="stream_options")
    return usage, usage and in_chunks


def template_variables(fields: Fields) -> dict[str, Any]:
    """What the client sets for the chat template; whether that reads it is seen when it is known."""
    variables = {name: value for name, value in fields.object("chat_template_kwargs").items() if value is not None}
    for name, value in variables.items():
        # Plain words only: what stands in the prompt must not speak as another role.
        if name in _OWN_VARIABLES or not (isinstance(value, bool | int) or _is_word(value)):
            field = f"chat_template_kwargs.{name[:40]}"
            raise bad(f"{field}: expected true, false, a number or a word", param="chat_template_kwargs")
    if not isinstance(variables.get("enable_thinking", True), bool):
        raise bad("chat_template_kwargs.enable_thinking: expected true or false", param="chat_template_kwargs")
    effort = fields.take("reasoning_effort")
    if effort is None:
        return variables
    if not _is_word(effort):
        raise wrong("reasoning_effort", effort, "a word")
    # OpenAI's word for no reasoning at all; GLM has a switch for that, and takes the other words as they are.
    return {"enable_thinking": False, **variables} if effort == "none" else {"reasoning_effort": effort, **variables}


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,32}", value) is not None


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    given = fields.object("logit_bias")
    if len(given) > MAX_LISTED_TOKENS:
        raise bad(f"logit_bias: found {len(given)} tokens, expected at most {MAX_LISTED_TOKENS}", param="logit_bias")
    for name, value in given.items():
        if not re.fullmatch(r"[0-9]{1,9}", name):
            raise bad(f"logit_bias: found the key {name[:40]!r}, expected a token id", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise bad(f"logit_bias.{name}: found {str(value)[:40]}, expected -100 to 100", param="logit_bias")
        biases[int(name)] = float(value)
    return tuple(biases.items())


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


def _check_rest(fields: Fields) -> tuple[str, ...]:
    """What is left: fields without effect, fields that must not be overlooked, and unknown ones, which are returned."""
    ignored = []
    for name in fields.rest():
        value = fields.take(name)
        if name in _UNSUPPORTED and not _UNSUPPORTED[name](value):
            raise bad(f"{name}: this server does not support it", param=name, code="unsupported_parameter")
        if name not in _UNSUPPORTED and name not in _HARMLESS:
            ignored.append(name)
    return tuple(ignored)
