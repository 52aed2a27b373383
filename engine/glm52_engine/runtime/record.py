"""One request on the event loop's side, from submission to the return of its last block."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass
from typing import Literal

from glm52_engine.runtime.stored import Fetch
from glm52_engine.runtime.stream import TokenStream
from glm52_engine.runtime.types import Blocks, Prefilled, Request, Token
from glm52_engine.schedule import Grant

State = Literal["waiting", "fetching", "computing", "held", "decoding"]


class EngineStopped(RuntimeError):
    """The engine was stopped, a rank failed, or the request was released while this call was waiting for it."""


@dataclass(slots=True)
class Record:
    """`prefix`: keys of the prompt's full blocks, if any are shared. `came`, `seated`: monotonic seconds.

    `stored`: leading blocks that the store had when it was asked; `fetched`: blocks that came from there, behind those
    that the grant says are cached.

    Of a decode whose KV goes to the store: `chain`, the key before the prompt's first block and those of its full
    blocks; `output`, its tokens so far.
    """

    key: str
    request: Request
    prefill: bool
    done: asyncio.Future[Prefilled | Blocks]
    came: float
    prefix: tuple[bytes, ...] = ()
    seated: float = 0.0
    state: State = "waiting"
    grant: Grant | None = None
    stored: int = 0
    fetched: int = 0
    fetch: Fetch | None = None
    closing: bool = False
    chain: tuple[bytes, ...] = ()
    output: list[int] | None = None
    stream_ref: weakref.ref[TokenStream] | None = None

    @property
    def blocks(self) -> Blocks:
        if self.grant is None:
            raise RuntimeError(f"{self.request.id} has no blocks yet")
        return Blocks(self.grant.rank, self.grant.blocks)

    @property
    def cached(self) -> int:
        """Leading blocks that were there when it was seated."""
        return 0 if self.grant is None else self.grant.cached

    @property
    def stream(self) -> TokenStream | None:
        """None also when the consumer dropped it: holding it here would keep a dropped one alive, and its blocks."""
        return None if self.stream_ref is None else self.stream_ref()

    def note(self, token: Token | None) -> None:
        """Keeps the output of a decode whose KV goes to the store."""
        if self.output is not None and token is not None:
            self.output.append(token.id)
            if token.finish == "error":
                # Logits that are no numbers come from KV that is none. The end may be told after the token.
                self.output = None

    def resolve(self, result: Prefilled | Blocks) -> None:
        if not self.done.done():
            self.done.set_result(result)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            # A call that was cancelled never looks; asyncio would log that as an error.
            self.done.exception()
