from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.route.openapi import document
from glm52_engine.serve import form, openai
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


_SCHEMAS = document(MODEL)["components"]["schemas"]
EVERY_FIELD = sorted(
    {
        *_SCHEMAS["ChatRequest"]["properties"],
        *_SCHEMAS["CompletionRequest"]["properties"],
        *openai._UNSUPPORTED,
        *openai._HARMLESS,
        *form._GUIDED,
    }
    - {"model", "messages", "prompt"}
)


@pytest.mark.parametrize("field", EVERY_FIELD)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_null_means_absent(endpoint: Endpoint, field: str) -> None:
    make = chat if endpoint == "chat" else completion
    assert read_request(endpoint, make(**{field: None}), MODEL) == read_request(endpoint, make(), MODEL)


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
        *(({"n": value}, "n") for value in (0, 129, "1", True)),
        *(({"min_tokens": value}, "min_tokens") for value in (-1, 1.5, "1")),
        *(({"min_p": value}, "min_p") for value in (-0.1, 1.1, "0")),
        *(({name: value}, name) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, "1")),
        *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, 101, "1")),
        *(({"logit_bias": value}, "logit_bias") for value in ([], {"x": 1}, {"-1": 1}, {"1.5": 1}, {"": 1})),
        *(({"logit_bias": {"5": value}}, "logit_bias") for value in (101, -101, "1", None, True)),
        *(({"logprobs": value}, "logprobs") for value in (1, "true")),
        *(({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (21, -1, "3")),
        *(({"skip_special_tokens": value}, "skip_special_tokens") for value in (0, "false")),
        *(({"include_stop_str_in_output": value}, "include_stop_str_in_output") for value in (1, "x")),
        *(({"priority": value}, "priority") for value in (1.5, "high")),
        ({"cache_salt": 5}, "cache_salt"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "continuous_usage_stats"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"chat_template_kwargs": {"x": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "<|user|>"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs"),
        ({"reasoning_effort": "very high"}, "reasoning_effort"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(more: dict[str, Any], param: str) -> None:
    error = refusal("chat", chat(**more))
    assert (error.status, error.param) == (400, param)
    assert param in error.message


@pytest.mark.parametrize(
    ("more", "param"),
    [
        *(({"logprobs": value}, "logprobs") for value in (True, -1, 21, "3")),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
    ],
)
def test_a_wrong_field_of_a_completion(more: dict[str, Any], param: str) -> None:
    error = refusal("completions", completion(**more))
    assert (error.status, error.param) == (400, param)
    assert param in error.message


def test_fields_that_nobody_knows_are_ignored_and_told() -> None:
    asked = read_request("chat", chat(tempature=1, prompt="x", temperature=0.5), MODEL)
    assert asked.ignored == ("prompt", "tempature")
    assert asked.temperature == 0.5


def test_every_sampling_field_is_read() -> None:
    sent = {
        "n": 3,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "seed": -1,
        "ignore_eos": True,
        "priority": -5,
        "cache_salt": "me",
    }
    asked = read_request("chat", chat(**sent), MODEL)
    assert {name: getattr(asked, name) for name in sent} == sent
    assert read_request("chat", chat(top_k=-1), MODEL).top_k == 0
    assert read_request("chat", chat(logit_bias={"7": -100, "12": 1.5}), MODEL).logit_bias == ((7, -100.0), (12, 1.5))
    assert read_request("chat", chat(logit_bias={"7": 1, "07": 2}), MODEL).logit_bias == ((7, 2.0),)
    assert read_request("chat", chat(logprobs=True), MODEL).logprobs == 0
    assert read_request("chat", chat(logprobs=True, top_logprobs=20), MODEL).logprobs == 20
    assert read_request("chat", chat(logprobs=False), MODEL).logprobs is None
    assert read_request("completions", completion(logprobs=0), MODEL).logprobs == 0
    assert read_request("completions", completion(n=2, best_of=2, echo=True), MODEL).echo
    stream = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert read_request("chat", stream, MODEL).usage_in_chunks
    alone = chat(stream=True, stream_options={"continuous_usage_stats": True})
    assert not read_request("chat", alone, MODEL).usage_in_chunks, "without usage there is nothing to repeat"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(
    st.sampled_from(["chat", "completions"]),
    st.dictionaries(st.sampled_from([*EVERY_FIELD, "messages", "prompt", "new"]), JSON_VALUES, max_size=4),
)
def test_no_body_does_anything_but_read_or_refuse(endpoint: Endpoint, more: dict[str, Any]) -> None:
    whole = {**(chat() if endpoint == "chat" else completion()), **more}
    with contextlib.suppress(ApiError):
        read_request(endpoint, whole, MODEL)
        return
    error = refusal(endpoint, whole)
    assert error.status == 400
    assert error.param
    assert error.param in error.message


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


def called(arguments: Any) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return chat(messages=[{"role": "assistant", "content": None, "tool_calls": calls}])


TOWER = '{"a": ' * 65 + "1" + "}" * 65
"""One object more than a body may have in each other."""


@pytest.mark.parametrize(
    "text", ["{", "[1]", "NaN", '{"a": NaN}', TOWER, '{"a": ' * 990 + "1" + "}" * 990, "[" * 100_000, 3, ["{}"]]
)
def test_arguments_of_a_call_that_are_none(text: Any) -> None:
    error = refusal("chat", called(text))
    assert (error.status, error.param) == (400, "messages")
    assert "messages[0].tool_calls[0].function.arguments" in error.message


@pytest.mark.parametrize(
    ("text", "read"),
    [(None, {}), ("", {}), ('{"a": [1]}', {"a": [1]}), (r'{"\udc00": "x\ud83d y"}', {"\ufffd": "x\ufffd y"})],
)
def test_arguments_of_a_call_are_read_like_the_body_around_them(text: str | None, read: dict[str, Any]) -> None:
    (message,) = read_request("chat", called(text), MODEL).messages
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": read}


@pytest.mark.parametrize("field", ["guided_json", "structured_outputs"])
def test_a_schema_as_text_is_read_like_the_body_around_it(field: str) -> None:
    def asking(text: str) -> dict[str, Any]:
        return chat(**{field: text if field == "guided_json" else {"json": text}})

    half = read_request("chat", asking(r'{"const": "x\ud83d"}'), MODEL)
    assert half.form.text is not None
    assert half.form.text.schema == {"const": "x\ufffd"}
    for text in ("{", "NaN", '{"items": ' * 65 + "{}" + "}" * 65):
        error = refusal("chat", asking(text))
        assert (error.status, error.param) == (400, field)
        assert field in error.message


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
    asked = read_request("chat", chat(max_completion_tokens=7), MODEL)
    assert (asked.max_tokens, asked.max_tokens_field) == (7, "max_completion_tokens")


def test_fields_without_effect_are_taken() -> None:
    asked = read_request(
        "chat",
        chat(
            user="me", metadata={}, store=True, n=1, logprobs=False, frequency_penalty=0, tools=[], tool_choice="none"
        ),
        MODEL,
    )
    assert asked == read_request("chat", chat(), MODEL)
