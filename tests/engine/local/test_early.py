"""Real processes and the real model: a prompt of several steps crosses while it is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from glm52_engine.route.proxy import EARLY_BODY_BYTES
from glm52_engine.runtime.load import STEP_TOKENS
from glm52_engine.tokenizer import Tokenizer
from tests.engine.local.running import MODEL, Running, pods
from tests.engine.model.support import Ours

pytestmark = pytest.mark.processes


def test_most_of_a_long_prompt_has_crossed_when_it_is_computed(tiny_checkpoint: Path) -> None:
    step = STEP_TOKENS["cpu"]
    prompt = [32 + index * index % 90 for index in range(3 * step + 77)]
    running = Running("--model", str(tiny_checkpoint), "--hi-sparse")
    try:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)
        # The router judges by the body's size; what makes it long here is no part of the prompt.
        asked: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, "user": "x"}
        early = client.completions.create(**{**asked, "user": "x" * EARLY_BODY_BYTES}).choices[0].text
        decode = pods(running)["decode"][0]
        assert 0 < decode["kv_bytes_early"] < decode["kv_bytes_in"]
        assert (decode["kv_pulls"], decode["kv_pulls_failed"]) == (1, 0)
        again = client.completions.create(**asked).choices[0].text
        last = pods(running)["decode"][0]
        assert last["kv_bytes_early"] == decode["kv_bytes_early"]
        assert last["kv_bytes_in"] == 2 * decode["kv_bytes_in"]
        assert last["blocks_free"] == last["blocks_total"]
    finally:
        assert running.end() == 0
    alone = Ours(tiny_checkpoint)
    # One sequence has the blocks of all.
    alone.tables = alone.tables.view(1, -1)
    tokens = alone.greedy(prompt, 16, chunk=step)
    assert early == again == Tokenizer.load(tiny_checkpoint).decode(tokens)
