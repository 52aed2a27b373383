from __future__ import annotations

from typing import Any

import pytest

from glm52_engine.serve.errors import ApiError
from glm52_engine.serve.fields import parse_object
from glm52_engine.serve.openai import Endpoint, read_request

MODEL = "glm-5.2"
USER = {"role": "user", "content": "Hi"}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hi", **more}


def refusal(endpoint: Endpoint, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_request(endpoint, body, MODEL)
    assert set(caught.value.body()["error"]) == {"message", "type", "param", "code"}
    return caught.value


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        pytest.param(b"", "not valid JSON", id="empty"),
        pytest.param(b"{", "not valid JSON", id="half"),
        pytest.param(b"[]", "expected an object", id="array"),
        pytest.param(b"null", "JSON null", id="null"),
        pytest.param(b'{"temperature": NaN}', "NaN", id="NaN"),
        pytest.param(b'{"model": "\xff"}', "not UTF-8", id="not UTF-8"),
        pytest.param(b"[" * 200_000, "nested too deeply", id="a tower of arrays"),
    ],
)
def test_a_body_that_is_no_object(raw: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        parse_object(raw)
    assert caught.value.status == 400


def test_half_a_surrogate_pair_is_replaced_everywhere() -> None:
    assert parse_object(rb'{"a\ud800": ["x\udfff y", "\ud83d\ude00"]}') == {"a\ufffd": ["x\ufffd y", "😀"]}


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_null_means_absent(endpoint: Endpoint, field: str) -> None:
    make = chat if endpoint == "chat" else completion
    assert read_request(endpoint, make(**{field: None}), MODEL) == read_request(endpoint, make(), MODEL)


@pytest.mark.parametrize(
    "field", ["stream", "stream_options", "logprobs", "tools", "tool_choice", "logit_bias", "user", "response_format"]
)
def test_null_means_absent_for_the_rest_too(field: str) -> None:
    assert read_request("chat", chat(**{field: None}), MODEL) == read_request("chat", chat(), MODEL)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        *(({"max_tokens": value}, "max_tokens") for value in (0, -1, 1.5, "5", True, 10**12)),
        *(({"max_completion_tokens": value}, "max_completion_tokens") for value in (0, "x")),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        *(({"temperature": value}, "temperature") for value in (-1, 3, "1", True, [])),
        *(({"top_p": value}, "top_p") for value in (0, 1.1, -0.1, "1")),
        *(({"top_k": value}, "top_k") for value in (-2, 1.0)),
        *(({"seed": value}, "seed") for value in (1.5, "1", 2**63)),
        *(({"stop": value}, "stop") for value in ("", [""], 3, [3], ["x"] * 17, "x" * 1025)),
        *(({"stop_token_ids": value}, "stop_token_ids") for value in (3, ["3"], [-1])),
        *(({"stream": value}, "stream") for value in ("true", 1)),
        *(({"stream_options": value, "stream": True}, "stream_options") for value in ([], {"x": 1})),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        *(({"n": value}, "n") for value in (0, 2, "1", True)),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
        ({"tempature": 1}, "tempature"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(more: dict[str, Any], param: str) -> None:
    error = refusal("chat", chat(**more))
    assert (error.status, error.param) == (400, param)
    assert param in error.message


def test_another_model_is_a_404() -> None:
    error = refusal("chat", chat(model="other"))
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([], id="empty"),
        pytest.param(None, id="absent"),
        pytest.param("Hi", id="a string"),
        pytest.param(["Hi"], id="no object"),
        pytest.param([{"content": "Hi"}], id="no role"),
        pytest.param([{"role": "robot", "content": "Hi"}], id="unknown role"),
        pytest.param([{"role": "user"}], id="no content"),
        pytest.param([{"role": "user", "content": None}], id="null content"),
        pytest.param([{"role": "user", "content": []}], id="no parts"),
        pytest.param([{"role": "user", "content": 3}], id="a number"),
        pytest.param([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], id="an image"),
        pytest.param([{"role": "user", "content": [{"type": "text"}]}], id="a part without text"),
        pytest.param([{"role": "assistant", "content": None, "tool_calls": [{}]}], id="a call without function"),
        pytest.param([{"role": "assistant", "tool_calls": "x"}], id="calls that are no array"),
    ],
)
def test_messages_that_are_none(messages: Any) -> None:
    error = refusal("chat", {"model": MODEL, "messages": messages})
    assert (error.status, error.param) == (400, "messages")


@pytest.mark.parametrize(
    ("message", "content"),
    [
        pytest.param({"role": "assistant", "content": "Hi"}, "Hi", id="a lone assistant"),
        pytest.param({"role": "system", "content": "Hi"}, "Hi", id="a lone system"),
        pytest.param({"role": "user", "content": ""}, "", id="empty text"),
        pytest.param({"role": "assistant", "content": None}, "", id="an assistant without content"),
        pytest.param({"role": "assistant", "content": "", "tool_calls": []}, "", id="no calls"),
        pytest.param({"role": "user", "content": "Hi", "name": "x"}, "Hi", id="a name"),
        pytest.param(
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            "ab",
            id="parts",
        ),
    ],
)
def test_odd_but_legal_messages(message: dict[str, Any], content: str) -> None:
    assert read_request("chat", {"model": MODEL, "messages": [message]}, MODEL).messages[0]["content"] == content


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        pytest.param("Hi", "Hi", id="text"),
        pytest.param(["Hi"], "Hi", id="a batch of one"),
        pytest.param([1, 2], (1, 2), id="token ids"),
        pytest.param([[1, 2]], (1, 2), id="a batch of one, as ids"),
    ],
)
def test_prompts(prompt: Any, read: str | tuple[int, ...]) -> None:
    assert read_request("completions", completion(prompt=prompt), MODEL).prompt == read


@pytest.mark.parametrize("prompt", [None, "", [], ["a", "b"], [[1], [2]], [1, "a"], [-1], [1.5], [True], {}, 3])
def test_prompts_that_are_none(prompt: Any) -> None:
    error = refusal("completions", completion(prompt=prompt))
    assert (error.status, error.param) == (400, "prompt")


def test_defaults() -> None:
    assert read_request("completions", completion(), MODEL).max_tokens == 16
    assert read_request("chat", chat(), MODEL).max_tokens is None
    assert read_request("chat", chat(max_completion_tokens=7), MODEL).max_tokens == 7


def test_fields_without_effect_are_taken() -> None:
    asked = read_request(
        "chat",
        chat(
            user="me", metadata={}, store=True, n=1, logprobs=False, frequency_penalty=0, tools=[], tool_choice="none"
        ),
        MODEL,
    )
    assert asked == read_request("chat", chat(), MODEL)
