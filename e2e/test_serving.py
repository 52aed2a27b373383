"""Greedy tokens through router, prefill and decode equal the oracle's, and the KV really crossed."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from e2e.kube import Kubectl, total
from e2e.reference import Reference
from e2e.traffic import Answer, stream_completion

pytestmark = pytest.mark.cluster

PREFILL, DECODE = "chat-prefill-0", "chat-decode-0"
OUTPUT = 12


def prompts_around(topk: int) -> list[list[int]]:
    """Token ids of plain bytes, with lengths below, at and far above the indexer's top-k."""
    draw = random.Random(52)
    return [[draw.randrange(32, 127) for _ in range(n)] for n in (1, topk - 1, topk, topk + 1, 4 * topk, 700)]


async def ask_all(url: str, prompts: list[list[int]]) -> list[Answer]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as session:
        return await asyncio.gather(*(stream_completion(session, url, p, max_tokens=OUTPUT) for p in prompts))


def crossed(chat: Kubectl) -> dict[str, float]:
    prefill, decode = chat.metrics(PREFILL), chat.metrics(DECODE)
    return {
        "computed by prefill": total(prefill, "glm52_prompt_tokens_computed_total"),
        "found by prefill": total(prefill, "vllm:prefix_cache_hits_total"),
        "computed by decode": total(decode, "glm52_prompt_tokens_computed_total"),
        "bytes out of prefill": total(prefill, "glm52_kv_transfer_bytes_total", direction="out"),
        "bytes into decode": total(decode, "glm52_kv_transfer_bytes_total", direction="in"),
    }


def test_streamed_tokens_equal_the_oracle_and_the_kv_crossed(
    chat: Kubectl, chat_url: str, checkpoint: Path, reference: Reference
) -> None:
    topk = json.loads((checkpoint / "config.json").read_text())["index_topk"]
    prompts = prompts_around(topk)
    before = crossed(chat)

    answers = asyncio.run(ask_all(chat_url, prompts))

    assert [a.error for a in answers] == [""] * len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference.greedy(prompt, OUTPUT), f"prompt of {len(prompt)} tokens"
        assert answer.usage["prompt_tokens"] == len(prompt)
        assert answer.usage["completion_tokens"] == OUTPUT
    after = crossed(chat)
    moved = {name: after[name] - before[name] for name in after}
    assert moved["computed by prefill"] + moved["found by prefill"] == sum(len(p) for p in prompts)
    assert moved["computed by decode"] == 0
    assert moved["bytes into decode"] == moved["bytes out of prefill"] > 0


def test_the_openai_client_chats_streamed_and_whole(chat_url: str) -> None:
    client = openai.OpenAI(base_url=f"{chat_url}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["glm-5.2"]
    ask: Any = partial(
        client.chat.completions.create,
        model="glm-5.2",
        messages=[{"role": "user", "content": "How do I scale decode?"}],
        max_tokens=16,
        temperature=0,
    )
    whole = ask()
    text = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True) if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        pytest.param("completions", b"{", 400, "JSON", id="no JSON"),
        pytest.param("completions", b"[]", 400, "object", id="no object"),
        pytest.param("completions", {"prompt": "x"}, 400, "model", id="no model"),
        pytest.param("completions", {"model": "other", "prompt": "x"}, 404, "other", id="unknown model"),
        pytest.param("completions", {"model": "glm-5.2", "prompt": "x" * 5000}, 400, "2048", id="too long"),
        pytest.param("completions", {"model": "glm-5.2", "prompt": "x", "max_tokens": -1}, 400, "max_tokens", id="-1"),
        pytest.param("chat/completions", {"model": "glm-5.2"}, 400, "messages", id="no messages"),
        pytest.param("chat/completions", {"model": "glm-5.2", "messages": []}, 400, "messages", id="no message"),
    ],
)
def test_a_bad_request_gets_an_openai_error(chat_url: str, path: str, body: object, status: int, said: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def post() -> tuple[int, str]:
        async with aiohttp.ClientSession() as session:
            headers = {"content-type": "application/json"}
            async with session.post(f"{chat_url}/v1/{path}", data=data, headers=headers) as response:
                return response.status, await response.text()

    found, text = asyncio.run(post())
    assert found == status, text
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"] or said == error["param"]
