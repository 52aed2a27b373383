"""What /metrics says: true numbers after requests, and the same names, types and labels as docs/metrics.md."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine.serve.deployment import PROMPT, Deployment, body, builder, families, until, value
from tests.engine.serve.fakes import FakeEngine
from tests.metrics_table import documented, served

pytestmark = pytest.mark.asyncio(loop_scope="module")

Sample = tuple[str, tuple[tuple[str, str], ...]]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def made(tiny_checkpoint: Path) -> AsyncIterator[Deployment]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with builder(monkeypatch, tiny_checkpoint) as build:
            yield await build.deployment([FakeEngine()], [FakeEngine()])


async def test_numbers_after_three_requests(made: Deployment) -> None:
    answers = await asyncio.gather(*(made.post("/v1/completions", body(stream=n == 0)) for n in range(3)))
    assert [answer.status for answer in answers] == [200] * 3
    assert (await made.post("/v1/completions", body(max_tokens=0))).status == 400
    await made.idle()
    prefill, decode = made.prefill[0].url, made.decode[0].url
    expected = [
        (prefill, "vllm:prompt_tokens_total", {}, 3 * len(PROMPT)),
        (prefill, "vllm:time_to_first_token_seconds_count", {}, 3),
        (prefill, "vllm:request_queue_time_seconds_count", {}, 3),
        (prefill, "vllm:request_prefill_time_seconds_count", {}, 3),
        (prefill, "vllm:request_prompt_tokens_sum", {}, 3 * len(PROMPT)),
        (prefill, "vllm:request_params_max_tokens_sum", {}, 36),
        (prefill, "vllm:e2e_request_latency_seconds_count", {}, 3),
        (prefill, "glm52_requests_failed_total", {"status": "400"}, 1),
        (prefill, "glm52_kv_transfers_total", {"outcome": "handed_over"}, 3),
        (decode, "vllm:generation_tokens_total", {}, 33),
        (decode, "vllm:request_success_total", {"finished_reason": "length"}, 3),
        (decode, "vllm:inter_token_latency_seconds_count", {}, 33),
        (decode, "vllm:request_generation_tokens_sum", {}, 36),
        (decode, "vllm:request_decode_time_seconds_count", {}, 3),
        (decode, "vllm:kv_cache_usage_perc", {}, 0),
        (decode, "glm52_kv_pull_seconds_count", {}, 3),
        (made.url, "glm52_router_requests_total", {"endpoint": "completions", "status": "200"}, 3),
        (made.url, "glm52_router_requests_total", {"endpoint": "completions", "status": "400"}, 1),
        (made.url, "glm52_router_time_to_first_byte_seconds_count", {}, 3),
        (made.url, "glm52_router_request_seconds_count", {}, 4),
        # Who was answered did not go away.
        (prefill, "glm52_requests_aborted_total", {}, 0),
        (decode, "glm52_requests_aborted_total", {}, 0),
        (made.url, "glm52_router_aborted_total", {}, 0),
        (made.url, "glm52_router_ready_pods", {"role": "decode"}, 1),
    ]
    found = [(url, name, labels, await value(made, url, name, **labels)) for url, name, labels, _ in expected]
    assert found == expected


async def test_gauges_while_a_request_runs(made: Deployment) -> None:
    made.decode[0].engine.step_seconds = 0.05
    running = asyncio.create_task(made.post("/v1/completions", body(max_tokens=60)))
    await until("decode runs", lambda: made.decode[0].engine.stats().running == 1)
    assert await value(made, made.decode[0].url, "vllm:num_requests_running") == 1
    assert 0 < await value(made, made.decode[0].url, "vllm:kv_cache_usage_perc") < 1
    assert await value(made, made.url, "glm52_router_in_flight", role="decode") == 1
    running.cancel()
    made.decode[0].engine.step_seconds = 0.0
    await made.idle()
    assert await value(made, made.decode[0].url, "glm52_requests_aborted_total") == 1


async def test_the_table_lists_what_is_there(made: Deployment) -> None:
    await made.post("/v1/completions", body(max_tokens=2))
    await made.post("/v1/completions", body(max_tokens=0))
    await made.idle()
    urls = {"prefill": made.prefill[0].url, "decode": made.decode[0].url, "router": made.url}
    found = {part: served(await families(made, url)) for part, url in urls.items()}
    table = documented()
    del table["operator"], table["store"], table["hiSparse"], table["paths"]
    # A series by status exists once there was one.
    failed = ("glm52_requests_failed_total", "counter", "model_name, status")
    success = ("vllm:request_success_total", "counter", "finished_reason, model_name")
    for part in ("prefill", "decode"):
        found[part] = {row for row in found[part] if row[0] not in (failed[0], success[0])} | {failed}
    found["decode"].add(success)
    assert {part: sorted(rows) for part, rows in found.items()} == {part: sorted(rows) for part, rows in table.items()}
