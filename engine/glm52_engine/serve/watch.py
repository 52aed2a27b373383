"""What happens to one call, told as it happens: to the histograms and to the call's span."""

from __future__ import annotations

import time
from collections.abc import Callable

from glm52_engine.lifecycle.trace import Span
from glm52_engine.runtime.types import Request
from glm52_engine.serve.metrics import Metrics


class Watch:
    """Every moment is told at most once; what never comes leaves no sample."""

    def __init__(self, metrics: Metrics, span: Span, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._span = span
        self._clock = clock
        self._began = self._mark = clock()

    def asked(self, request: Request) -> None:
        """Prefill: the prompt is tokenised, the request goes to the engine."""
        self._metrics.prompt.observe(len(request.prompt))
        self._metrics.max_tokens.observe(request.sampling.max_tokens)
        self._span.put(
            {
                "gen_ai.usage.input_tokens": len(request.prompt),
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
            }
        )
        self._mark = self._clock()

    def first_token(self, queued: float) -> None:
        """Prefill: `queued` seconds of the time since `asked` went by before the engine began."""
        now = self._clock()
        self._metrics.queue.observe(queued)
        self._metrics.prefill.observe(max(0.0, now - self._mark - queued))
        self._metrics.first_token.observe(now - self._began)
        self._span.put({"glm52.queue_seconds": queued})
        self._span.event("first token")

    def seated(self) -> None:
        """Decode: a seat and KV blocks are reserved."""
        self._metrics.queue.observe(self._lap())
        self._span.event("seat reserved")

    def pulled(self) -> None:
        """Decode: the prompt's KV is here."""
        self._metrics.pull_seconds.observe(self._lap())
        self._span.event("KV pulled")

    def tokens(self) -> Callable[[], None]:
        """Decode: to be called with every token of one sequence."""
        observe, clock, last = self._metrics.token_gap.observe, self._clock, self._clock()

        def token() -> None:
            nonlocal last
            now = clock()
            observe(now - last)
            last = now

        return token

    def finished(self, reason: str, generated: int) -> None:
        """Decode: the client has its answer."""
        self._metrics.success.labels(self._metrics.model, reason).inc()
        self._metrics.generated.observe(generated)
        self._metrics.decode.observe(self._lap())
        self._span.put({"gen_ai.usage.output_tokens": generated, "gen_ai.response.finish_reasons": reason})

    def ended(self) -> float:
        """The call is answered; its seconds."""
        seconds = self._clock() - self._began
        self._metrics.latency.observe(seconds)
        return seconds

    def _lap(self) -> float:
        now = self._clock()
        lap, self._mark = now - self._mark, now
        return lap
