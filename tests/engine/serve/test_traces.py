"""One trace across router, prefill and decode, and what is passed on when no spans are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from glm52_engine.lifecycle import trace
from tests.engine.serve.deployment import Deployment, body, builder

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.use(provider)
    yield exporter
    trace.use(None)


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    found = spans.get_finished_spans()
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in found}


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_trace_through_all_three(
    deployed: Deployment, spans: InMemorySpanExporter, stream: bool
) -> None:
    answer = await deployed.post("/v1/completions", body(stream=stream), headers=GIVEN)
    assert answer.status == 200
    await deployed.idle()
    found = by_name(spans)
    assert set(found) == {"POST /v1/completions", "prefill leg", "prefill", "decode leg", "decode"}
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    root = found["POST /v1/completions"]
    assert parent(root) == int(PARENT, 16)
    for role in ("prefill", "decode"):
        leg, served = found[f"{role} leg"], found[role]
        assert (parent(leg), leg.kind) == (root.context.span_id, SpanKind.CLIENT)
        assert (parent(served), served.kind) == (leg.context.span_id, SpanKind.SERVER)
    assert root.attributes is not None
    assert root.attributes["http.response.status_code"] == 200
    assert {
        span.attributes["glm52.request_id"] for span in found.values() if "glm52.request_id" in span.attributes
    } == {"mine"}
    prefill, decode = found["prefill"], found["decode"]
    assert prefill.attributes["gen_ai.usage.input_tokens"] == 23
    assert decode.attributes["gen_ai.usage.output_tokens"] == 12
    assert [event.name for event in prefill.events] == ["first token"]
    assert [event.name for event in decode.events] == ["seat reserved", "KV pulled"]


async def test_requests_without_a_parent_are_traces_of_their_own(
    deployed: Deployment, spans: InMemorySpanExporter
) -> None:
    for _ in range(2):
        await deployed.post("/v1/completions", body(max_tokens=1))
    roots = [span for span in spans.get_finished_spans() if span.parent is None]
    assert [span.name for span in roots] == ["POST /v1/completions"] * 2
    assert len({span.context.trace_id for span in spans.get_finished_spans()}) == 2


async def test_a_client_s_fault_is_no_error_of_the_server_s_span(
    deployed: Deployment, spans: InMemorySpanExporter
) -> None:
    await deployed.post("/v1/completions", body(temperature=9), headers=GIVEN)
    for span in spans.get_finished_spans():
        assert span.attributes is not None
        assert span.attributes["http.response.status_code"] == 400
        assert span.status.status_code is StatusCode.UNSET


async def test_a_server_s_fault_is_one(
    deployed: Deployment, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployed.prefill[0].engine, "prefill", lambda request: 1 / 0)
    answer = await deployed.post("/v1/completions", body(), headers=GIVEN)
    assert answer.status == 500
    assert {span.status.status_code for span in spans.get_finished_spans()} == {StatusCode.ERROR}


@pytest.mark.parametrize("given", [GIVEN, {"traceparent": "nonsense"}, {"traceparent": "ä"}, {}], ids=str)
async def test_without_spans_the_trace_is_handed_on_as_it_came(given: dict[str, str], tiny_checkpoint: Path) -> None:
    seen: list[str | None] = []

    async def pod(request: web.Request) -> web.Response:
        if request.method == "POST":
            seen.append(request.headers.get("traceparent"))
        return web.json_response({"error": {"message": "no"}}, status=400 if request.method == "POST" else 200)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pod)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with builder(monkeypatch, tiny_checkpoint) as build:
            made = Deployment(build.session, url=await build.router([url], [url]))
            assert (await made.post("/v1/completions", body(), headers=given)).status == 400
    await runner.cleanup()
    usable = given.get("traceparent", "")
    assert seen == [usable if usable.isascii() and usable else None]
