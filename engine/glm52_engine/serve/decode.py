"""POST /internal/v1/decode: reserve, pull the prompt's KV, continue, and answer exactly what the client gets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import cast

from glm52_engine.runtime.types import Blocks, FinishReason, Request, Token
from glm52_engine.serve.answers import Shape
from glm52_engine.serve.errors import bad, unavailable
from glm52_engine.serve.openai import Asked, read_request
from glm52_engine.serve.pod import DecodeCall, Loaded, Pod
from glm52_engine.serve.sender import Sender
from glm52_engine.serve.text import Piece, TextStream, engine_request
from glm52_engine.serve.watch import Watch
from glm52_engine.transfer.agent import TransferError
from glm52_engine.transfer.peers import KvReference

log = logging.getLogger(__name__)


async def decode(pod: Pod, call: DecodeCall, sender: Sender, watch: Watch) -> None:
    # A pod that takes no requests leaves the lease alone: the router offers the same KV to another one.
    with pod.life.serving():
        parts = pod.parts()
        with _offered(parts, call) as offer:
            # A long conversation takes a while to check; the streams and the probes must go on meanwhile.
            run = await asyncio.to_thread(_prepare, pod, parts, call, watch)
            if run.piece.finish:
                await run.answer(sender, _only(run.piece))
            elif call.kv is None:
                raise bad("kv: missing, and the first token is not the last", param="kv")
            else:
                _check_geometry(parts, run.request, call.kv)
                await _continue(run, offer, call.kv, sender)
        log.info("answered", extra={"request": call.id, "tokens": run.text.tokens, "seconds": watch.ended()})


@dataclass(slots=True)
class _Offer:
    """Whether a prefill pod still holds KV for us."""

    open: bool


@contextlib.contextmanager
def _offered(parts: Loaded, call: DecodeCall) -> Iterator[_Offer]:
    offer = _Offer(call.kv is not None)
    try:
        yield offer
    finally:
        if offer.open and call.kv is not None:
            parts.puller.give_up(call.kv, call.id)


@dataclass(slots=True)
class _Run:
    """One request on its way through this pod."""

    pod: Pod
    parts: Loaded
    asked: Asked
    request: Request
    first: Token
    text: TextStream
    piece: Piece
    """What the first token adds."""
    shape: Shape
    watch: Watch

    async def answer(self, sender: Sender, pieces: AsyncIterator[Piece]) -> None:
        finish = await (self._stream(sender, pieces) if self.asked.stream else self._whole(sender, pieces))
        self.watch.finished(finish, self.text.tokens)

    async def _whole(self, sender: Sender, pieces: AsyncIterator[Piece]) -> str:
        all_pieces = [piece async for piece in pieces]
        finish = _finish(all_pieces[-1])
        await sender.whole(200, self.shape.whole(all_pieces))
        return finish

    async def _stream(self, sender: Sender, pieces: AsyncIterator[Piece]) -> str:
        last: Piece | None = None
        async for piece in pieces:
            last = piece
            if piece.finish == "abort":
                break
            if self.shape.worth_sending(piece):
                await sender.event(self.shape.chunk(piece))
        finish = _finish(last)
        if self.asked.include_usage:
            await sender.event(self.shape.last(self.text.tokens))
        await sender.done()
        return finish


def _finish(last: Piece | None) -> str:
    """The finish reason; an answer that was cut off is an error, never a success."""
    if last is None or last.finish is None or last.finish == "abort":
        raise unavailable("this server is going away; the request was cut off", "aborted")
    return last.finish


def _prepare(pod: Pod, parts: Loaded, call: DecodeCall, watch: Watch) -> _Run:
    asked = read_request(call.endpoint, call.body, pod.config.model.name)
    if max(call.prompt_ids) >= parts.tokenizer.vocab_bound or min(call.prompt_ids) < 0:
        raise bad(f"prompt_ids: a token id is not below {parts.tokenizer.vocab_bound}", param="prompt_ids")
    if call.first_token.id >= parts.tokenizer.vocab_bound:
        raise bad(f"first_token: {call.first_token.id} is no token of this model", param="first_token")
    request = engine_request(
        asked,
        call.id,
        tuple(call.prompt_ids),
        seed=call.seed,
        max_model_len=pod.config.model.max_model_len,
        tokenizer=parts.tokenizer,
    )
    text = TextStream(asked, parts.tokenizer)
    first = Token(call.first_token.id, 0, cast("FinishReason | None", call.first_token.finish))
    shape = Shape(asked, call.id, len(request.prompt))
    return _Run(pod, parts, asked, request, first, text, text.push(first), shape, watch)


def _check_geometry(parts: Loaded, request: Request, kv: KvReference) -> None:
    parts.puller.check(kv)
    needed = -(-len(request.prompt) // parts.engine.pools[0].block_size)
    if kv.num_tokens != len(request.prompt) or len(kv.blocks) != needed:
        raise bad(
            f"kv: {len(kv.blocks)} blocks for {kv.num_tokens} tokens cannot hold a prompt of {len(request.prompt)}",
            param="kv",
        )


async def _continue(run: _Run, offer: _Offer, kv: KvReference, sender: Sender) -> None:
    engine, request = run.parts.engine, run.request
    try:
        blocks = await _reserve(run, kv)
        run.watch.seated()
        await run.parts.puller.pull(kv, request.id, request.prompt, blocks)
        offer.open = False
        run.watch.pulled()
        async with contextlib.aclosing(_pieces(run, blocks)) as pieces:
            await run.answer(sender, pieces)
    finally:
        # Harmless where decode's own end has freed everything; needed when it never began.
        engine.release(request.id)


async def _reserve(run: _Run, kv: KvReference) -> Blocks:
    """Waits for a seat and blocks while keeping prefill's lease alive; a lost lease ends the wait."""
    with run.parts.puller.keeping(kv, run.request.id) as lost:
        seat = asyncio.ensure_future(run.parts.engine.reserve(run.request))
        try:
            await asyncio.wait({seat, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not seat.done():
                lost.result()
                raise TransferError("the lease of the prompt's KV was lost")
            return seat.result()
        finally:
            if not seat.done():
                seat.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await seat


async def _only(piece: Piece) -> AsyncIterator[Piece]:
    yield piece


async def _pieces(run: _Run, blocks: Blocks) -> AsyncGenerator[Piece, None]:
    """Ends with the first piece that has a finish reason; closing it frees the seat and the blocks."""
    yield run.piece
    seen = run.watch.tokens()
    tokens = run.parts.engine.decode(run.request, blocks, run.first)
    try:
        async for token in tokens:
            seen()
            piece = run.text.push(token)
            yield piece
            if piece.finish:
                return
    finally:
        close = getattr(tokens, "aclose", None)
        if close is not None:
            await close()
