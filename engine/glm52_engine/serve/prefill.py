"""POST /internal/v1/prefill and what a prefill pod tells its decode peers about the KV it holds."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from glm52_engine.runtime.types import Blocks, Partial
from glm52_engine.runtime.types import Prefilled as EnginePrefilled
from glm52_engine.serve.constrain import constraint_of
from glm52_engine.serve.errors import ApiError, bad, no_number
from glm52_engine.serve.lengths import refuse_hopeless
from glm52_engine.serve.openai import Asked, read_request
from glm52_engine.serve.pod import FirstToken, Loaded, Pod, PrefillCall, Prefilled
from glm52_engine.serve.queued import unless_drained
from glm52_engine.serve.sender import Sender
from glm52_engine.serve.text import engine_request, new_seed, prompt_ids
from glm52_engine.serve.watch import Watch
from glm52_engine.transfer.peers import (
    BeatCall,
    BeatCard,
    KvReference,
    LeaseCall,
    LeaseCard,
    ProgressCall,
    ProgressCard,
    PromptCard,
)

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 1.0
"""After which a decode pod that follows a prompt has an answer in any case."""

LOOK_SECONDS = 0.02
"""A GPU tells nobody that a copy is done."""

LONG_PROMPT = 16_384
"""Tokens from which the answer, which lists them, is written on a thread."""


async def prefill(pod: Pod, call: PrefillCall, sender: Sender, watch: Watch) -> None:
    with pod.life.serving(stay=call.stay):
        parts = pod.parts()

        def understood() -> tuple[Asked, tuple[int, ...]]:
            asked = read_request(call.endpoint, call.body, pod.config.model.name)
            refuse_hopeless(asked, parts.tokenizer, pod.config.model.max_model_len)
            return asked, prompt_ids(asked, parts.tokenizer)

        # A large body takes seconds to check, render and tokenise; the probes must be answered meanwhile.
        asked, prompt = await asyncio.to_thread(understood)
        if not prompt:
            raise bad("prompt: has no tokens", param="prompt")
        seed = new_seed() if asked.seed is None else asked.seed
        request = engine_request(
            asked,
            call.id,
            prompt,
            seed=seed,
            max_model_len=pod.config.model.max_model_len,
            tokenizer=parts.tokenizer,
        )
        constraint = await constraint_of(asked, prompt, parts.tokenizer, parts.grammars)
        if asked.ignored:
            names = [name[:40] for name in asked.ignored[:20]]
            log.warning("fields that this server does not know", extra={"request": call.id, "fields": names})
        watch.asked(request)
        result = await unless_drained(
            pod.life,
            parts.engine.prefill(replace(request, constraint=constraint)),
            stay=call.stay,
            withdraw=lambda: parts.engine.withdraw(call.id),
            give_back=lambda: parts.engine.release(call.id),
        )
        watch.first_token(result.queued_seconds)
        answer = _hold(pod, parts, call.id, prompt, seed, result)
        try:
            await sender.written(200, await _encoded(answer))
        except asyncio.CancelledError:
            parts.holder.give_up(call.id)
            raise
        log.info("prefilled", extra={"request": call.id, "tokens": len(prompt), "seconds": watch.ended()})


async def _encoded(answer: Prefilled) -> bytes:
    def encode() -> bytes:
        return answer.model_dump_json().encode()

    return encode() if len(answer.prompt_ids) < LONG_PROMPT else await asyncio.to_thread(encode)


def _hold(
    pod: Pod, parts: Loaded, request_id: str, prompt: tuple[int, ...], seed: int, result: EnginePrefilled
) -> Prefilled:
    """Puts the KV under a lease, or frees it when nobody needs it."""
    tokens = (result.token, *result.others)
    readers = sum(token.finish is None for token in tokens)
    if not readers or any(token.finish == "error" for token in tokens):
        parts.engine.release(request_id)
    if any(token.finish == "error" for token in tokens):
        raise no_number()
    answer = Prefilled(
        id=request_id,
        prompt_ids=list(prompt),
        first_tokens=[FirstToken.of(token) for token in tokens],
        seed=seed,
        cached_tokens=result.cached_tokens,
    )
    if not readers:
        return answer
    parts.holder.grant(request_id, result.blocks, prompt, readers)
    return answer.model_copy(update={"kv": _reference(pod, parts, result.blocks, len(prompt))})


def _reference(pod: Pod, parts: Loaded, blocks: Blocks, num_tokens: int) -> KvReference:
    return KvReference(
        address=pod.address,
        agent=parts.agent.name,
        rank=blocks.rank,
        blocks=list(blocks.ids),
        num_tokens=num_tokens,
        fingerprint=parts.fingerprint,
    )


async def renew_lease(pod: Pod, call: LeaseCall) -> LeaseCard:
    parts = _called(pod, call.agent)
    lease = parts.holder.renew(call.id)
    if lease is None:
        raise ApiError(404, f"no KV is held for request {call.id}: its lease is over", code="no_lease")
    blocks = lease.blocks
    return LeaseCard(
        rank=blocks.rank,
        blocks=list(blocks.ids),
        num_tokens=lease.num_tokens,
        digest=lease.digest,
        seconds=parts.holder.table.heard_seconds,
        checksums=await parts.agent.checksums(blocks.rank, blocks.ids) if call.checksums else None,
    )


def heartbeat(pod: Pod, call: BeatCall) -> BeatCard:
    holder = _called(pod, call.agent).holder
    held = [request_id for request_id in call.ids if holder.renew(request_id) is not None]
    return BeatCard(held=held, seconds=holder.table.heard_seconds)


async def progress(pod: Pod, call: ProgressCall) -> ProgressCard:
    parts = _called(pod, call.agent) if call.agent else pod.parts()
    if parts.agent.described.others:
        # Of replicas of several hosts nothing is read early.
        return ProgressCard(state="unknown")
    until = pod.life.clock() + PROGRESS_SECONDS
    while True:
        partial = parts.engine.partial(call.id)
        over = pod.life.clock() >= until
        # Who does not know our agent asks for the first time: the prompt may be on its way to the engine.
        if partial is None and not call.agent and not over and not parts.holder.holds(call.id):
            await asyncio.sleep(LOOK_SECONDS)
            continue
        if partial is None:
            return ProgressCard(state="over" if parts.holder.holds(call.id) else "unknown")
        if partial.request.choices > 1:
            # Each reads into blocks of its own.
            return ProgressCard(state="unknown")
        kept = partial.kept // parts.engine.pools[0].block_size
        if kept > call.seen or over:
            return _progress_of(pod, parts, call, partial, kept)
        await asyncio.sleep(LOOK_SECONDS)


def _progress_of(pod: Pod, parts: Loaded, call: ProgressCall, partial: Partial, kept: int) -> ProgressCard:
    request, blocks = partial.request, partial.blocks
    if blocks is None:
        return ProgressCard(state="waiting")
    prompt = (
        PromptCard(
            ids=list(request.prompt),
            max_tokens=request.sampling.max_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        if call.prompt and kept
        else None
    )
    kv = _reference(pod, parts, blocks, len(request.prompt))
    return ProgressCard(state="computing", kept=kept, kv=kv, prompt=prompt)


def _called(pod: Pod, agent: str) -> Loaded:
    """Raises ApiError for a life of this pod that is over: its blocks are nobody's any more."""
    parts = pod.parts()
    if agent != parts.agent.name:
        raise ApiError(410, f"this pod's agent is {parts.agent.name}: {agent} is gone", code="agent_gone")
    return parts


def release_lease(pod: Pod, body: dict[str, Any]) -> dict[str, Any]:
    request_id = body.get("id")
    if not isinstance(request_id, str):
        raise bad("id: expected a string", param="id")
    return {"id": request_id, "released": pod.parts().holder.give_up(request_id)}
