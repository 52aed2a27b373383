"""What the handlers of one engine pod share, once the engine is loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm52_engine.config import EngineConfig, Role
from glm52_engine.lifecycle.life import Life, Refused
from glm52_engine.lifecycle.phases import Phase, Phases
from glm52_engine.lifecycle.start import InternalToken
from glm52_engine.runtime.types import Engine, EngineBusy, Logprobs, RequestError, Token
from glm52_engine.serve.errors import DRAINING, KV_MISMATCH, ApiError, bad, unavailable
from glm52_engine.serve.limits import Endpoint
from glm52_engine.serve.metrics import Metrics
from glm52_engine.structured import GrammarCompiler
from glm52_engine.tokenizer import Tokenizer
from glm52_engine.transfer.agent import KvAgent
from glm52_engine.transfer.early import EarlyPulls
from glm52_engine.transfer.fingerprint import Fingerprint
from glm52_engine.transfer.hold import Holder, TransferCounters
from glm52_engine.transfer.peers import KvMismatch, KvReference, Puller
from glm52_engine.transfer.pulls import TransferError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Loaded:
    """Exists only when everything works: weights, pools, one forward, the transfer agent."""

    engine: Engine
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    agent: KvAgent
    holder: Holder
    puller: Puller
    early: EarlyPulls
    fingerprint: Fingerprint
    stopped: type[Exception]
    """What the engine's calls raise when it stops."""


@dataclass(slots=True)
class Pod:
    config: EngineConfig
    role: Role
    host: str
    address: str
    token: InternalToken
    life: Life
    phases: Phases
    """Of the start."""
    counters: TransferCounters
    metrics: Metrics
    loaded: Loaded | None = None
    failure: str = ""

    def start_phases(self) -> list[tuple[str, Phase]]:
        """Host and phase; of all hosts of a replica."""
        every = {self.host: self.phases.done, **self.phases.others}
        return [(host, phase) for host, phases in every.items() for phase in list(phases)]

    def parts(self) -> Loaded:
        if self.loaded is None:
            raise unavailable(f"{self.host} is {self.life.state.why_not(self.life.clock()) or 'starting'}", "not_ready")
        return self.loaded


class _Envelope(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str = Field(min_length=1, max_length=200)
    endpoint: Endpoint
    body: dict[str, Any]
    stay: bool = Field(default=False, description="No other pod takes it: a drain serves it while its window lasts.")


class PrefillCall(_Envelope):
    """POST /internal/v1/prefill."""


class EarlyCall(BaseModel):
    """POST /internal/v1/early: a prefill pod begins a long prompt that will be continued here, if all goes well."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str = Field(min_length=1, max_length=200)
    address: str = Field(min_length=1, max_length=300)


class FirstLogprobs(BaseModel):
    """See `runtime.types.Logprobs`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class FirstToken(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: int = Field(ge=0)
    finish: Literal["stop", "length"] | None = None
    logprobs: FirstLogprobs | None = None

    @classmethod
    def of(cls, token: Token) -> FirstToken:
        scores = token.logprobs
        logprobs = None if scores is None else FirstLogprobs(chosen=scores.chosen, top=scores.top)
        return cls.model_validate({"id": token.id, "finish": token.finish, "logprobs": logprobs})

    def token(self) -> Token:
        scores = self.logprobs
        return Token(self.id, 0, self.finish, None if scores is None else Logprobs(scores.chosen, scores.top))


class Prefilled(BaseModel):
    """Answer of /internal/v1/prefill, handed on by the router: a first token for each choice, and where the KV is.

    Without kv every first token was the last. `cached_tokens`: of the prompt, found in the prefix cache.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    prompt_ids: list[int] = Field(min_length=1)
    first_tokens: list[FirstToken] = Field(min_length=1)
    seed: int
    cached_tokens: int = Field(0, ge=0)
    kv: KvReference | None = None


class DecodeCall(_Envelope):
    """POST /internal/v1/decode: the client's body and all of prefill's answer."""

    prompt_ids: list[int] = Field(min_length=1)
    first_tokens: list[FirstToken] = Field(min_length=1)
    seed: int
    cached_tokens: int = Field(0, ge=0)
    kv: KvReference | None = None


CallT = TypeVar("CallT", bound=BaseModel)


def read_call(model: type[CallT], value: dict[str, Any]) -> CallT:
    """Raises ApiError 400 naming the wrong fields."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise bad(f"{name}: {first['msg']}", param=name) from error


def told(error: Exception, request_id: str, stopped: type[Exception] = Refused) -> ApiError:
    """What the client is told of an exception; anything unforeseen is a 500 here and a traceback in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return bad(str(error))
    if isinstance(error, EngineBusy):
        return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, stopped) and stopped is not Refused:
        return unavailable(f"this server is going away: {error}", "aborted")
    if isinstance(error, Refused):
        return unavailable(f"this server takes no requests: {error}", DRAINING if error.returns else "not_ready")
    if isinstance(error, TransferError):
        log.warning("KV hand-off failed: %s", error, extra={"request": request_id})
        return ApiError(502, str(error), code=KV_MISMATCH if isinstance(error, KvMismatch) else "kv_transfer_failed")
    log.error("request failed", exc_info=error, extra={"request": request_id})
    return ApiError(500, "the engine failed on this request; its log has the reason", code="internal_error")
