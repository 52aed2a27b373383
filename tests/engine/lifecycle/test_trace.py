"""Whether a process traces is decided by its environment, at its start."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from glm52_engine.lifecycle import trace


@pytest.fixture(autouse=True)
def off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    yield
    if trace._provider is not None:
        trace._provider.shutdown()
    trace.use(None)


def test_off_by_default() -> None:
    trace.setup("decode")
    with trace.serving("x", {}, {}) as span, trace.step("y"):
        span.put({"a": 1})
        assert trace.outgoing() == {}
    trace.flush()


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_an_endpoint_switches_it_on_and_one_that_is_away_harms_nobody(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr(trace, "FLUSH_SECONDS", 0.1)
    trace.setup("decode")
    with trace.serving("x", {}, {}):
        assert trace.outgoing()["traceparent"].startswith("00-")
    trace.flush()
    assert trace._provider is not None
    assert trace._provider.resource.attributes["service.name"] == "glm52-decode"


def test_the_standard_variables_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=x")
    trace.setup("decode")
    assert trace._provider is not None
    found = trace._provider.resource.attributes
    assert (found["service.name"], found["team"]) == ("chat", "x")
    trace.use(None)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    trace.setup("decode")
    assert trace._provider is None


def test_a_missing_library_is_said_and_nothing_else_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.ERROR):
        trace.setup("decode")
    assert "glm52-engine[trace]" in caplog.text
    assert trace._provider is None
