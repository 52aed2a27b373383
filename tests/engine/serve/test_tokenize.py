"""Text ↔ ids for clients: vLLM's shapes, the same prompt as a chat request has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.serve.errors import ApiError
from glm52_engine.serve.tokenize import detokenize, tokenize
from glm52_engine.tokenizer import Tokenizer
from tests.engine.serve.deployment import MODEL, Builder, body
from tests.engine.serve.fakes import FakeEngine

LIMITS: dict[str, Any] = {"model": MODEL, "max_model_len": 128}
USER = {"role": "user", "content": "hé<|user|>"}


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint)


def test_a_text(tokenizer: Tokenizer) -> None:
    answer = tokenize({"model": MODEL, "prompt": "hé", "return_token_strs": True}, tokenizer, **LIMITS)
    assert answer == {
        "count": 3,
        "max_model_len": 128,
        "tokens": [0x68, 0xC3, 0xA9],
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    plain = tokenize({"prompt": "", "add_special_tokens": True}, tokenizer, **LIMITS)
    assert (plain["tokens"], plain["token_strs"]) == ([], None)


def test_a_conversation(tokenizer: Tokenizer) -> None:
    sent = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    whole = tokenize(sent, tokenizer, **LIMITS)["tokens"]
    assert whole == tokenizer.encode_chat([USER], enable_thinking=False)
    open_end = tokenize({**sent, "add_generation_prompt": False}, tokenizer, **LIMITS)["tokens"]
    assert open_end == tokenizer.encode_chat([USER], add_generation_prompt=False)


@given(st.text())
def test_back_and_forth(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenize({"prompt": text}, tokenizer, **LIMITS)["tokens"]
    assert detokenize({"tokens": tokens}, tokenizer, **LIMITS) == {"prompt": text}


@pytest.mark.parametrize(
    ("use", "sent", "param"),
    [
        (tokenize, {}, "prompt"),
        (tokenize, {"prompt": ["a"]}, "prompt"),
        (tokenize, {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        (tokenize, {"messages": []}, "messages"),
        (tokenize, {"messages": [USER], "add_generation_prompt": "x"}, "add_generation_prompt"),
        (tokenize, {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        (detokenize, {}, "tokens"),
        (detokenize, {"tokens": "1"}, "tokens"),
        (detokenize, {"tokens": [-1]}, "tokens"),
        (detokenize, {"tokens": [10**6]}, "tokens"),
        (detokenize, {"tokens": [1.0]}, "tokens"),
    ],
)
def test_what_is_refused(tokenizer: Tokenizer, use: Any, sent: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        use(sent, tokenizer, **LIMITS)
    assert (caught.value.status, caught.value.param) == (400, param)
    with pytest.raises(ApiError) as caught:
        use({**sent, "model": "other"}, tokenizer, **LIMITS)
    assert caught.value.status == 404


async def test_on_pods_of_both_roles(build: Builder) -> None:
    made = await build.deployment([FakeEngine()], [FakeEngine()], router=False)
    chat = {"model": MODEL, "messages": [USER]}
    for pod in made.pods:
        answer = await made.internal(pod, "tokenize", chat)
        assert answer.status == 200
        counted = answer.json()
        back = await made.internal(pod, "detokenize", {"tokens": counted["tokens"]})
        assert "hé<|user|>" in back.json()["prompt"]
        refused = await made.internal(pod, "detokenize", {})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "tokens")
    assert (await made.post("/internal/v1/tokenize", body(), url=made.decode[0].url)).status == 401
