"""`glm52-engine local` as a user runs it: the real model, real processes, the official client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from glm52_engine.checkpoint import read_model_spec
from glm52_engine.kv import KvLayout
from glm52_engine.tokenizer import Tokenizer
from tests.engine.local.running import MODEL, Running, pods
from tests.engine.model.support import Ours

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def running(tiny_checkpoint: Path) -> Iterator[Running]:
    made = Running("--model", str(tiny_checkpoint), "--prefill", "2")
    try:
        made.says("Ctrl-C ends everything")
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)


def whole(client: openai.OpenAI, prompt: list[int], **more: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0, **more)


def test_streamed_and_whole_answers_agree_several_at_once(running: Running, client: openai.OpenAI) -> None:
    prompts = [[*b"The decode pool keeps row ", 48 + n, *b"." * (20 * n)] for n in range(6)]
    alone = [whole(client, prompt) for prompt in prompts]

    def streamed(prompt: list[int]) -> tuple[str, int]:
        options: Any = {"include_usage": True}
        chunks = list(whole(client, prompt, stream=True, stream_options=options))
        return "".join(c.choices[0].text for c in chunks if c.choices), chunks[-1].usage.total_tokens

    before = pods(running)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(streamed, prompts))
    assert together == [(answer.choices[0].text, answer.usage.total_tokens) for answer in alone]
    after = pods(running)
    computed, found = (
        [sum(p[name] for p in now["prefill"]) for now in (before, after)]
        for name in ("prompt_tokens_computed", "prefix_cache_hits")
    )
    assert computed[1] - computed[0] + found[1] - found[0] == sum(map(len, prompts))
    assert after["decode"][0]["prefix_cache_hits"] == 0
    assert after["decode"][0]["prompt_tokens_computed"] == 0
    moved = [sum(p["kv_bytes_out"] for p in now["prefill"]) for now in (before, after)]
    pulled = [now["decode"][0]["kv_bytes_in"] for now in (before, after)]
    assert moved[1] - moved[0] == pulled[1] - pulled[0] > 0


def test_chat_and_its_errors_through_the_official_client(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "How do I scale decode?"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, seed=3)
    again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, seed=3)
    assert answer.choices[0].message.content == again.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=10**6)


def test_a_prefill_pod_killed_under_load_gives_no_wrong_text_and_ends_everything_with_its_reason(
    running: Running, client: openai.OpenAI
) -> None:
    prompt = list(b"under load")
    expected = whole(client, prompt).choices[0].text
    victim = running.children()["prefill-0"]

    def answer(_: int) -> str:
        try:
            return str(whole(client, prompt).choices[0].text)
        except openai.InternalServerError as error:
            return f"refused {error.status_code}"
        except openai.APIConnectionError:
            return "router gone"

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(answer, n) for n in range(8)]
        os.kill(victim, signal.SIGKILL)
        texts = [each.result() for each in answers]
    # `local` ends with the first dead child, so requests that come late find nobody; those in progress are finished.
    assert set(texts) <= {expected, "refused 503", "router gone"}
    assert expected in texts
    assert running.process.wait(60) == 1
    running.says("prefill-0 ended", 5)
    assert running.children() == {}


def test_term_ends_everything_with_exit_code_0_and_leaves_no_orphan(tiny_checkpoint: Path) -> None:
    running = Running("--model", str(tiny_checkpoint))
    running.says("Ctrl-C ends everything")
    pids = set(running.children().values())
    folder = running.folder
    assert len(pids) == 3
    assert running.end() == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not folder.exists()


def test_kv_in_fp8_crosses_between_processes_and_is_read_through_hot_buffers(tiny_checkpoint: Path) -> None:
    prompt = [*b"The decode pool keeps its rows in eight bits."]
    # More than a hot buffer holds.
    longer = prompt * 4
    running = Running("--model", str(tiny_checkpoint), "--kv-cache-dtype", "fp8", "--hi-sparse")
    try:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)
        found = whole(client, prompt).choices[0].text
        layout = KvLayout.of(read_model_spec(tiny_checkpoint), 64, "fp8")
        assert pods(running)["decode"][0]["kv_bytes_in"] == layout.block_bytes
        also = whole(client, longer).choices[0].text
    finally:
        assert running.end() == 0
    alone = Ours(tiny_checkpoint, kv_cache_dtype="fp8")
    for tokens, text in ((prompt, found), (longer, also)):
        assert text == Tokenizer.load(tiny_checkpoint).decode(alone.greedy(tokens, 16, chunk=1000))


def test_a_checkpoint_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "glm52_engine.cli", "local", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 78
    assert out.stderr == f"glm52-engine local: {tmp_path}: found no config.json; expected a checkpoint directory\n"
