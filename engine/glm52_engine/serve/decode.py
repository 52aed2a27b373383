"""POST /internal/v1/decode: reserve, pull the prompt's KV, continue, and answer exactly what the client gets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from glm52_engine.lifecycle.life import Life, Refused
from glm52_engine.runtime.types import Blocks, EngineBusy, Request, Token
from glm52_engine.serve.answers import Choice, Shape, Tokens
from glm52_engine.serve.constrain import constraint_of, continued, thinking_of
from glm52_engine.serve.errors import bad, no_number, unavailable
from glm52_engine.serve.merge import merged
from glm52_engine.serve.openai import Asked, read_request
from glm52_engine.serve.pod import DecodeCall, Loaded, Pod
from glm52_engine.serve.queued import unless_drained
from glm52_engine.serve.sender import Sender
from glm52_engine.serve.text import Piece, TextStream, engine_request, prompt_text
from glm52_engine.serve.watch import Watch
from glm52_engine.transfer.early import Early
from glm52_engine.transfer.peers import KvMismatch, KvReference
from glm52_engine.transfer.pulls import PullCut, TransferError

log = logging.getLogger(__name__)

ROOM_SECONDS = 0.05
"""That a request waits for its seat before one that was taken early is given up for it."""


async def decode(pod: Pod, call: DecodeCall, sender: Sender, watch: Watch) -> None:
    # A pod that takes no requests leaves the lease alone: the router offers the same KV to another one.
    with pod.life.serving(stay=call.stay):
        parts = pod.parts()
        with _offered(parts, call) as offer:
            # A long conversation takes a while to check; the streams and the probes must go on meanwhile.
            run = await asyncio.to_thread(_prepare, pod, parts, call, watch, offer)
            if run.unfinished:
                _check_geometry(run, call.kv)
                await _constrain(run)
            sources = [_pieces(run, choice, call.kv) for choice in run.choices]
            async with contextlib.aclosing(merged(sources)) as pieces:
                finish = await (_stream(run, sender, pieces) if run.asked.stream else _whole(run, sender, pieces))
            watch.finished(finish, run.tokens.all)
        log.info("answered", extra={"request": call.id, "tokens": run.tokens.all, "seconds": watch.ended()})


@dataclass(slots=True)
class _Offer:
    """KV that a prefill pod holds for us until it has been read `readers` times."""

    readers: int


@contextlib.contextmanager
def _offered(parts: Loaded, call: DecodeCall) -> Iterator[_Offer]:
    offer = _Offer(sum(token.finish is None for token in call.first_tokens) if call.kv else 0)
    try:
        yield offer
    except (EngineBusy, KvMismatch, Refused):
        # Another decode pod may take it: the router offers it the same KV, or gives it up.
        offer.readers = 0
        raise
    finally:
        if offer.readers and call.kv is not None:
            parts.puller.give_up(call.kv, call.id)


@dataclass(slots=True)
class _Choice:
    """One choice: a request of its own to the engine."""

    request: Request
    first: Token
    text: TextStream
    piece: Piece
    """What the first token adds."""
    body: Choice


@dataclass(slots=True)
class _Run:
    """One call on its way through this pod."""

    parts: Loaded
    call_id: str
    asked: Asked
    choices: list[_Choice]
    shape: Shape
    watch: Watch
    offer: _Offer
    life: Life
    stay: bool
    seated: bool = False
    began: asyncio.Event = field(default_factory=asyncio.Event)
    """The first KV is here: until then a failure has a status of its own, and another pod may be tried."""

    @property
    def tokens(self) -> Tokens:
        choices = self.choices
        return Tokens(sum(c.text.tokens for c in choices), sum(c.body.reasoning_tokens for c in choices))

    @property
    def unfinished(self) -> bool:
        return any(choice.piece.finish is None for choice in self.choices)


async def _whole(run: _Run, sender: Sender, pieces: AsyncIterator[tuple[int, Piece]]) -> str:
    """Answers, and returns the finish reason of the first choice."""
    last: list[Piece | None] = [None for _ in run.choices]
    async for index, piece in pieces:
        _check(piece)
        last[index] = piece
        run.choices[index].body.keep(piece)
    finish = _finish(last)
    bodies = [choice.body.whole() for choice in run.choices]
    await sender.whole(200, run.shape.whole(bodies, run.tokens))
    return finish


async def _stream(run: _Run, sender: Sender, pieces: AsyncIterator[tuple[int, Piece]]) -> str:
    last: list[Piece | None] = [None for _ in run.choices]
    async for index, piece in pieces:
        _check(piece)
        last[index] = piece
        body = run.choices[index].body.chunk(piece)
        if body is not None:
            await sender.event(run.shape.chunk(body, run.tokens))
    finish = _finish(last)
    if run.asked.include_usage:
        await sender.event(run.shape.last(run.tokens))
    await sender.done()
    return finish


def _check(piece: Piece) -> None:
    """An answer that was cut off is an error, never a success."""
    if piece.finish == "abort":
        raise unavailable("this server is going away; the request was cut off", "aborted")
    if piece.finish == "error":
        raise no_number()


def _finish(last: list[Piece | None]) -> str:
    reasons = [piece.finish if piece else None for piece in last]
    if None in reasons:
        raise unavailable("this server is going away; the request was cut off", "aborted")
    return str(reasons[0])


def _prepare(pod: Pod, parts: Loaded, call: DecodeCall, watch: Watch, offer: _Offer) -> _Run:
    asked = read_request(call.endpoint, call.body, pod.config.model.name)
    bound = parts.tokenizer.vocab_bound
    if max(call.prompt_ids) >= bound or min(call.prompt_ids) < 0:
        raise bad(f"prompt_ids: a token id is not below {bound}", param="prompt_ids")
    if len(call.first_tokens) != asked.n or max(token.id for token in call.first_tokens) >= bound:
        raise bad(f"first_tokens: expected {asked.n} with ids below {bound}", param="first_tokens")
    prompt = tuple(call.prompt_ids)
    limits = {"max_model_len": pod.config.model.max_model_len, "seed": call.seed}
    request = engine_request(asked, call.id, prompt, tokenizer=parts.tokenizer, **limits)
    thinking = thinking_of(asked, prompt, parts.tokenizer)
    echo = prompt_text(asked, prompt, parts.tokenizer) if asked.echo else ""
    choices = []
    for index, first in enumerate(call.first_tokens):
        text, token = TextStream(asked, parts.tokenizer), first.token()
        own = replace(
            request,
            id=f"{call.id}/{index}" if index else call.id,
            sampling=replace(request.sampling, choice=index),
            choices=1,
        )
        choices.append(_Choice(own, token, text, text.push(token), Choice(asked, index, thinking, echo)))
    shape = Shape(asked, call.id, prompt_tokens=len(prompt), cached_tokens=call.cached_tokens)
    return _Run(parts, call.id, asked, choices, shape, watch, offer, pod.life, call.stay)


async def _constrain(run: _Run) -> None:
    """Every choice goes on under the grammar that drew its first token."""
    prompt = run.choices[0].request.prompt
    constraint = await constraint_of(run.asked, prompt, run.parts.tokenizer, run.parts.grammars)
    if constraint is not None:
        for choice in run.choices:
            choice.request = replace(choice.request, constraint=continued(constraint, choice.first))


def _check_geometry(run: _Run, kv: KvReference | None) -> None:
    if kv is None:
        raise bad("kv: missing, and a first token is not the last", param="kv")
    run.parts.puller.check(kv)
    prompt = len(run.choices[0].request.prompt)
    needed = -(-prompt // run.parts.engine.pools[0].block_size)
    if kv.num_tokens != prompt or len(kv.blocks) != needed:
        raise bad(
            f"kv: {len(kv.blocks)} blocks for {kv.num_tokens} tokens cannot hold a prompt of {prompt}", param="kv"
        )


async def _pieces(run: _Run, choice: _Choice, kv: KvReference | None) -> AsyncGenerator[Piece, None]:
    """Ends with the first piece that has a finish reason; closing it frees the seat and the blocks.

    Every choice pulls the KV into blocks of its own as soon as it has a seat: choices that waited for each other while
    they hold seats could wait for ever.
    """
    if choice.piece.finish or kv is None:
        if run.unfinished:
            await run.began.wait()
        yield choice.piece
        return

    def let_go() -> None:
        # Not the id of before: a seat that was taken early has its own.
        run.parts.engine.release(choice.request.id)

    late: Future[None] | None = None
    try:
        try:
            blocks = await _pull(run, choice, kv)
        except PullCut as error:
            late = error.over
            raise
        yield choice.piece
        seen = run.watch.tokens()
        tokens = run.parts.engine.decode(choice.request, blocks, choice.first)
        try:
            async for token in tokens:
                seen()
                piece = choice.text.push(token)
                yield piece
                if piece.finish:
                    return
        finally:
            close = getattr(tokens, "aclose", None)
            if close is not None:
                await close()
    finally:
        # Harmless where decode's own end has freed everything; needed when it never began.
        if late is None:
            let_go()
        else:
            # The client has its answer, but the blocks may still be written to.
            asyncio.wrap_future(late).add_done_callback(lambda over: let_go())


async def _pull(run: _Run, choice: _Choice, kv: KvReference) -> Blocks:
    engine, request, here = run.parts.engine, choice.request, 0
    early, seated = None, False
    # Choices read into blocks of their own, and only one seat was taken.
    if len(run.choices) == 1 and run.call_id in run.parts.early:
        if seated := run.parts.early.seated(run.call_id):
            run.watch.seated()
        early = await _claim(run, choice, kv)
    if early is not None:
        request, blocks, here = early
    else:
        blocks = await unless_drained(
            run.life,
            _reserve(run, request, kv),
            stay=run.stay,
            # A call of which one choice has begun finishes here.
            withdraw=lambda: not run.seated and engine.withdraw(request.id),
            give_back=lambda: engine.release(request.id),
        )
    first, run.seated = not run.seated, True
    if first and not seated:
        run.watch.seated()
    await run.parts.puller.pull(kv, run.call_id, request.prompt, blocks, here=here)
    run.offer.readers -= 1
    if first:
        run.watch.pulled()
    run.began.set()
    return blocks


async def _claim(run: _Run, choice: _Choice, kv: KvReference) -> Early:
    """What of the KV came while the rest was computed; keeps the lease while its last part comes."""

    def take(request: Request) -> None:
        choice.request = request

    with run.parts.puller.keeping(kv, run.call_id) as lost:
        claim = asyncio.ensure_future(run.parts.early.claim(kv, run.call_id, choice.request, take))
        either: set[asyncio.Future[Any]] = {claim, lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not claim.done():
                lost.result()
                raise TransferError("the lease of the prompt's KV was lost")
            return claim.result()
        finally:
            if not claim.done():
                claim.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await claim


async def _reserve(run: _Run, request: Request, kv: KvReference) -> Blocks:
    """Waits for a seat and blocks while keeping prefill's lease alive; a lost lease ends the wait."""
    with run.parts.puller.keeping(kv, run.call_id) as lost:
        seat = asyncio.ensure_future(run.parts.engine.reserve(request))
        either: set[asyncio.Future[Any]] = {seat, lost}
        try:
            await asyncio.wait(either, timeout=ROOM_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not seat.done():
                run.parts.early.make_room()
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not seat.done():
                lost.result()
                raise TransferError("the lease of the prompt's KV was lost")
            return seat.result()
        finally:
            if not seat.done():
                seat.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await seat
