"""JSON schemas of what the router takes and gives, for its OpenAPI document. Fields that nobody knows are ignored."""

from __future__ import annotations

from typing import Any

from glm52_engine.serve.limits import (
    MAX_CHOICES,
    MAX_LISTED_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MOST,
    REPETITION_PENALTY,
)
from glm52_engine.serve.messages import ROLES

Schema = dict[str, Any]

FUNCTION_NAME = "^[a-zA-Z0-9_.:/-]{1,128}$"
"""As the parser of calls has it, which a router does not import."""

FINISH_REASONS = ("stop", "length", "tool_calls")


def optional(schema: Schema, text: str = "") -> Schema:
    """null is the same as an absent field."""
    return {"anyOf": [schema, {"type": "null"}], **({"description": text} if text else {})}


def integer(low: int, high: int, text: str = "") -> Schema:
    return optional({"type": "integer", "minimum": low, "maximum": high}, text)


def number(low: float, high: float, text: str = "") -> Schema:
    return optional({"type": "number", "minimum": low, "maximum": high}, text)


def above(low: float, high: float, text: str = "") -> Schema:
    return optional({"type": "number", "exclusiveMinimum": low, "maximum": high}, text)


def flag(text: str = "") -> Schema:
    return optional({"type": "boolean"}, text)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def closed(properties: Schema, required: tuple[str, ...] | None = None) -> Schema:
    """An object with exactly these fields; all of them unless `required` says less."""
    needed = list(properties if required is None else required)
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


TEXT: Schema = {"type": "string"}
WORD: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,32}$"}
TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": MOST}
COUNT: Schema = {"type": "integer", "minimum": 0}
STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}

SAMPLING: Schema = {
    "max_tokens": integer(1, MOST, "Most tokens of the answer."),
    "min_tokens": integer(0, MOST, "No token that ends the answer is chosen before so many."),
    "temperature": number(0, 2, "0 takes the likeliest token."),
    "top_p": above(0, 1),
    "top_k": integer(-1, MOST, "0 and -1: all."),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(*REPETITION_PENALTY),
    "logit_bias": optional(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LISTED_TOKENS,
        }
    ),
    "seed": integer(-(2**63), 2**63 - 1, "Equal requests with equal seeds have equal answers."),
    "stop": optional({"anyOf": [STOP, array(STOP, maxItems=MAX_STOPS)]}, "Ends the answer before this text."),
    "include_stop_str_in_output": flag(),
    "stop_token_ids": optional(array(TOKEN, maxItems=MAX_LISTED_TOKENS)),
    "ignore_eos": flag("The model's own end does not end the answer."),
    "skip_special_tokens": flag(),
    "n": integer(1, MAX_CHOICES, "Answers to one prompt, which is computed once."),
    "stream": flag("Server-sent events instead of one answer."),
    "stream_options": optional(
        {
            "type": "object",
            "properties": {"include_usage": flag(), "continuous_usage_stats": flag(), "include_obfuscation": flag()},
            "additionalProperties": False,
        },
        "Only with stream: true.",
    ),
    "return_token_ids": flag(),
    "priority": integer(-MOST, MOST, "Lower runs first."),
    "cache_salt": optional(TEXT, "Only requests with the same salt share cached prompts."),
    "user": optional(TEXT, "Without effect."),
}

_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": FUNCTION_NAME},
        "description": optional(TEXT),
        "parameters": optional({"type": "object"}, "A JSON schema; the arguments of a call are typed by it."),
        "strict": flag("Calls fit their schemas, also where the model chooses whether to call."),
    },
    "required": ["name"],
}

_NAMED: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": TEXT}, "required": ["name"]},
    },
    "required": ["type", "function"],
}

TOOLS: Schema = {
    "tools": optional(
        array(
            {
                "type": "object",
                "properties": {"type": {"const": "function"}, "function": _FUNCTION},
                "required": ["type", "function"],
            }
        )
    ),
    "tool_choice": optional({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]}),
    "parallel_tool_calls": flag("Whether an answer may hold more than one call; default true."),
}

TEXT_FORM: Schema = {
    "response_format": optional(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]},
            },
            "required": ["type"],
        }
    ),
    "structured_outputs": optional(
        {
            "type": "object",
            "properties": {
                "json": {"type": ["object", "string"]},
                "json_object": {"type": "boolean"},
                "regex": TEXT,
                "choice": array(TEXT, minItems=1),
                "grammar": TEXT,
            },
        },
        "vLLM's name for text that has to fit: one of its fields.",
    ),
}

USAGE = closed(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": closed({"cached_tokens": COUNT}),
        "completion_tokens_details": closed({"reasoning_tokens": COUNT}),
    }
)

_SCORE: Schema = {"token": TEXT, "logprob": {"type": "number"}, "bytes": array({"type": "integer"})}

_CHOICE: Schema = {
    "index": COUNT,
    "finish_reason": {"enum": list(FINISH_REASONS)},
    "stop_reason": {"type": ["string", "integer", "null"], "description": "The stop string or token that was met."},
    "token_ids": array(TOKEN),
}

_ALWAYS = ("index", "finish_reason", "logprobs")


def request(model: str, properties: Schema, *required: str) -> Schema:
    named: Schema = {"model": {"enum": [model], "description": "The one model of this server."}}
    return {"type": "object", "properties": {**named, **properties}, "required": list(required)}


def answer(kind: str, choice: str) -> Schema:
    head = {"id": TEXT, "object": {"const": kind}, "created": {"type": "integer"}, "model": TEXT}
    return closed({**head, "choices": array(ref(choice), minItems=1), "usage": ref("Usage")})


def components(model: str) -> Schema:
    """Every schema that the document refers to, by name."""
    tool_call = closed(
        {"id": TEXT, "type": {"const": "function"}, "function": closed({"name": TEXT, "arguments": TEXT})}
    )
    content = {"anyOf": [TEXT, array(ref("TextPart"), minItems=1)]}
    return {
        "Error": closed({"error": closed({name: _error_field(name) for name in ("message", "type", "param", "code")})}),
        "TextPart": closed({"type": {"const": "text"}, "text": TEXT}),
        "Message": {
            "type": "object",
            "properties": {"role": {"enum": list(ROLES)}, "content": content, "tool_call_id": TEXT},
            "required": ["role", "content"],
        },
        "ChatRequest": request(model, _chat_fields(), "model", "messages"),
        "CompletionRequest": request(model, _completion_fields(), "model", "prompt"),
        "TokenizeRequest": request(
            model, {"prompt": TEXT, "messages": array(ref("Message"), minItems=1), "return_token_strs": flag()}
        ),
        "DetokenizeRequest": request(model, {"tokens": array(TOKEN)}, "tokens"),
        "ToolCall": tool_call,
        "ChatAnswer": answer("chat.completion", "ChatChoice"),
        "CompletionAnswer": answer("text_completion", "CompletionChoice"),
        "ChatChoice": closed(
            {**_CHOICE, "message": ref("Reply"), "logprobs": optional(_chat_logprobs())}, (*_ALWAYS, "message")
        ),
        "CompletionChoice": closed(
            {**_CHOICE, "text": TEXT, "logprobs": optional(_completion_logprobs())}, (*_ALWAYS, "text")
        ),
        "Reply": closed(
            {
                "role": {"const": "assistant"},
                "content": {"type": ["string", "null"]},
                "reasoning_content": TEXT,
                "reasoning": {**TEXT, "description": "The same as reasoning_content, under vLLM's name."},
                "refusal": {"type": "null"},
                "tool_calls": array(ref("ToolCall")),
            },
            ("role", "content"),
        ),
        "Usage": USAGE,
        "Model": closed(
            {
                "id": TEXT,
                "object": {"const": "model"},
                "created": {"type": "integer"},
                "owned_by": TEXT,
                "max_model_len": {"type": "integer", "minimum": 1},
            }
        ),
        "Models": closed({"object": {"const": "list"}, "data": array(ref("Model"), minItems=1)}),
        "Tokens": closed(
            {
                "count": COUNT,
                "max_model_len": {"type": "integer"},
                "tokens": array(TOKEN),
                "token_strs": optional(array(TEXT)),
            }
        ),
        "Text": closed({"prompt": TEXT}),
    }


def _error_field(name: str) -> Schema:
    return TEXT if name in ("message", "type") else {"type": ["string", "null"]}


def _chat_fields() -> Schema:
    return {
        "messages": array(ref("Message"), minItems=1),
        **SAMPLING,
        **TOOLS,
        **TEXT_FORM,
        "max_completion_tokens": integer(1, MOST, "max_tokens under its newer name."),
        "logprobs": flag("Log probabilities of the answer's tokens."),
        "top_logprobs": integer(0, MAX_LOGPROBS, "Likeliest tokens beside each; only with logprobs: true."),
        "reasoning_effort": optional(WORD, "none: no reasoning. Other words are the chat template's."),
        "chat_template_kwargs": optional(
            {
                "type": "object",
                "properties": {"enable_thinking": flag()},
                "additionalProperties": {"anyOf": [{"type": ["boolean", "integer"]}, WORD]},
            },
            "Variables of the chat template, as far as it has them.",
        ),
    }


def _completion_fields() -> Schema:
    prompt = {"anyOf": [{"type": "string", "minLength": 1}, array(TOKEN, minItems=1)]}
    return {
        "prompt": prompt,
        **SAMPLING,
        **TEXT_FORM,
        "logprobs": integer(0, MAX_LOGPROBS, "Likeliest tokens beside each of the answer."),
        "echo": flag("Repeats the prompt before the answer."),
    }


def _chat_logprobs() -> Schema:
    entry = closed({**_SCORE, "top_logprobs": array(closed(_SCORE))})
    return closed({"content": array(entry), "refusal": {"type": "null"}})


def _completion_logprobs() -> Schema:
    return closed(
        {
            "tokens": array(TEXT),
            "token_logprobs": array({"type": "number"}),
            "top_logprobs": array({"type": "object", "additionalProperties": {"type": "number"}}),
            "text_offset": array(COUNT),
        }
    )
