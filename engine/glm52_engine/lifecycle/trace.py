"""OpenTelemetry spans across router, prefill and decode; nothing of it is imported unless an exporter is configured.

OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) switches it on; OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
OTEL_TRACES_SAMPLER and OTEL_EXPORTER_OTLP_HEADERS mean what they always do. A caller's W3C traceparent is continued,
and handed on even when no spans are made here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

from glm52_engine.lifecycle.logs import bound

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

log = logging.getLogger(__name__)

Kind = Literal["SERVER", "CLIENT", "INTERNAL"]
Attributes = Mapping[str, str | int | float | bool]

PROPAGATED = ("traceparent", "tracestate")
FLUSH_SECONDS = 2.0
"""At the end of a process: a collector that is away must not keep a pod from leaving."""

_provider: TracerProvider | None = None
_passing: ContextVar[Mapping[str, str]] = ContextVar("passing")


class Span:
    """What a span may be told; does nothing when tracing is off."""

    def __init__(self, span: OtelSpan | None = None) -> None:
        self._span = span

    def put(self, attributes: Attributes) -> None:
        if self._span is not None:
            self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        if self._span is not None:
            self._span.add_event(name)

    def answered(self, status: int, reason: str = "") -> None:
        """With an HTTP status; by the conventions only what is the server's fault makes its span an error."""
        if self._span is not None:
            self._span.set_attribute("http.response.status_code", status)
            if status >= 500:
                from opentelemetry.trace import StatusCode

                self._span.set_status(StatusCode.ERROR, reason)


_SILENT = Span()


def setup(part: str) -> None:
    """Exports spans of this process if the environment says where to. Never fails: serving does not depend on it."""
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    where = next((os.environ[name] for name in names if os.environ.get(name)), "")
    if not where or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"glm52-{part}"}
        # At the exit we flush, for a limited time; the library's own way would wait for a collector that is away.
        provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except Exception as error:
        words = "no traces: they are configured and cannot be made; install glm52-engine[trace] or unset the variable"
        log.error(words, extra={"endpoint": where, "reason": f"{type(error).__name__}: {error}"})
        return
    use(provider)
    log.info("tracing", extra={"endpoint": where})


def use(provider: TracerProvider | None) -> None:
    global _provider
    _provider = provider


def flush() -> None:
    """Sends what is left, for FLUSH_SECONDS at most."""
    if _provider is not None:
        thread = threading.Thread(target=_provider.force_flush, daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)


@contextlib.contextmanager
def serving(name: str, headers: Mapping[str, str], attributes: Attributes) -> Iterator[Span]:
    """Around the answer to one incoming call, whose headers may continue a trace."""
    # Anything else is no trace context, and could not be sent on as a header either.
    given = {key: value for key in PROPAGATED if (value := headers.get(key, "")) and value.isascii()}
    if _provider is None:
        token = _passing.set(given)
        try:
            yield _SILENT
        finally:
            _passing.reset(token)
        return
    from opentelemetry.propagate import extract

    with _span(name, "SERVER", attributes, extract(given)) as span:
        yield span


@contextlib.contextmanager
def step(name: str, attributes: Attributes | None = None, kind: Kind = "INTERNAL") -> Iterator[Span]:
    """Around a part of the work, below whatever span is current in this task."""
    if _provider is None:
        yield _SILENT
        return
    with _span(name, kind, attributes or {}, None) as span:
        yield span


def outgoing() -> dict[str, str]:
    """Headers that let the called server continue this trace."""
    if _provider is None:
        return dict(_passing.get({}))
    from opentelemetry.propagate import inject

    headers: dict[str, str] = {}
    inject(headers)
    return headers


@contextlib.contextmanager
def _span(name: str, kind: Kind, attributes: Attributes, parent: Context | None) -> Iterator[Span]:
    from opentelemetry.trace import SpanKind, format_trace_id

    assert _provider is not None
    tracer = _provider.get_tracer("glm52_engine")
    # A cancellation is no failure of ours, and most exceptions are answers: who raises them says `answered`.
    started = tracer.start_as_current_span(
        name,
        context=parent,
        kind=SpanKind[kind],
        attributes=dict(attributes),
        record_exception=False,
        set_status_on_exception=False,
    )
    with started as span, bound(trace_id=format_trace_id(span.get_span_context().trace_id)):
        yield Span(span)
