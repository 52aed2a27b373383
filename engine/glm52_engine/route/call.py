"""One client request in progress, and the calls that are made for it. The client's body stays the bytes that came."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

from glm52_engine.config import Role
from glm52_engine.route.legs import LegFailed
from glm52_engine.serve.errors import DRAINING, ApiError
from glm52_engine.serve.limits import Endpoint

PublicEndpoint = Endpoint | Literal["tokenize", "detokenize"]

REQUEST_ID = "x-request-id"
_END = b"data: [DONE]\n\n"
_PREFIXES = {"chat": "chatcmpl", "completions": "cmpl"}
_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def given_id(headers: Mapping[str, str]) -> str | None:
    """The client's own x-request-id, if it is one that can stand in headers and logs."""
    value = headers.get(REQUEST_ID, "")
    return value if _USABLE_ID.fullmatch(value) else None


@dataclass(slots=True)
class Exchange:
    request: web.Request
    endpoint: PublicEndpoint
    body: bytes
    """A JSON object in UTF-8, checked."""
    wait_seconds: float
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = field(default_factory=time.monotonic)
    tried: set[str] = field(default_factory=set)
    retries: int = 0
    last: ApiError | None = None
    picked: dict[Role, str] = field(default_factory=dict)
    """The pod of each role that was asked last."""
    draining: set[str] = field(default_factory=set)
    """Pods that sent it on because they go: where nobody else is, it returns and stays."""
    gone: set[str] = field(default_factory=set)
    """Of those, the ones that would not let it stay."""
    tail: bytes = b""
    """The last bytes of a stream that went to the client."""

    def sent(self, chunk: bytes) -> None:
        self.tail = (self.tail + chunk)[-len(_END) :]

    @property
    def complete(self) -> bool:
        """The client has a whole stream: many leave at once then, before the connection is told that it ends."""
        return self.tail == _END

    @property
    def public(self) -> str:
        """The id of the answer."""
        return f"{_PREFIXES.get(self.endpoint, self.endpoint)}-{self.id}"

    @property
    def generates(self) -> bool:
        """False: one question to one pod, no tokens are generated."""
        return self.endpoint in _PREFIXES

    @property
    def request_id(self) -> str:
        """What x-request-id says in every answer and every log line."""
        return given_id(self.request.headers) or self.public

    def note(self, failure: LegFailed) -> None:
        self.tried.add(failure.url)
        if failure.url in self.draining:
            self.gone.add(failure.url)
        elif failure.error.code == DRAINING:
            self.draining.add(failure.url)
        self.last = failure.error
        self.retries += 1
