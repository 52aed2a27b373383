"""An engine whose tokens come from the KV bytes in its pool: wrong bytes give wrong tokens, as in the real one."""

from __future__ import annotations

import asyncio
import ctypes
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm52_engine.runtime.types import (
    Blocks,
    EngineBusy,
    FinishReason,
    KvPool,
    Logprobs,
    Partial,
    Prefilled,
    Request,
    RequestError,
    Stats,
    Token,
)

BLOCK_SIZE = 4
TOKEN_BYTES = 64
LETTERS = [ord(letter) for letter in "abcdefghijklmnopqrstuvwxyz ."]


class EngineStopped(Exception):
    pass


class Memory:
    """Stands for the tensor of a pool."""

    def __init__(self, size: int) -> None:
        self.bytes = (ctypes.c_uint8 * size)()

    def data_ptr(self) -> int:
        return ctypes.addressof(self.bytes)


class FakePool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = BLOCK_SIZE
        self.block_bytes = BLOCK_SIZE * TOKEN_BYTES
        self.tensor: Any = Memory(num_blocks * self.block_bytes)

    def slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // BLOCK_SIZE] * self.block_bytes + position % BLOCK_SIZE * TOKEN_BYTES

    def write(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens):
            at = self.slot(blocks, position)
            self.tensor.bytes[at : at + TOKEN_BYTES] = (token + 1).to_bytes(4, "little") * (TOKEN_BYTES // 4)

    def read(self, blocks: Sequence[int], count: int) -> bytes:
        starts = [self.slot(blocks, position) for position in range(count)]
        return b"".join(bytes(self.tensor.bytes[at : at + TOKEN_BYTES]) for at in starts)


@dataclass
class FakeEngine:
    num_blocks: int = 64
    seats: int = 4
    step_seconds: float = 0.0
    model: str = "m"
    ends_after: int | None = None
    """Output index of an end-of-sequence token."""
    no_number_at: int | None = None
    """Output index at which the logits are none."""
    cached: int = 0
    """Tokens of every prompt that a prefix cache had."""
    stuck: float = 0.0
    broken: BaseException | None = None
    stopped: bool = False
    chunk: int = 0
    """Tokens of a prompt that a step computes, and waits for `may_step`; 0: all at once."""
    computed: int = 0
    generated: int = 0
    decoded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Ids in an order of their own, so that blocks here and there differ.
        self._free = list(range(0, self.num_blocks, 2)) + list(range(1, self.num_blocks, 2))
        self._held: dict[str, tuple[int, ...]] = {}
        self._changed = asyncio.Event()
        self._running = 0
        self._queued: set[str] = set()
        self._partial: dict[str, Partial] = {}
        self.may_step = asyncio.Semaphore(0)
        """Released once for every chunk that may be computed; the last one of a prompt as well."""
        self.pool = FakePool(self.num_blocks)
        self.pools: Sequence[KvPool] = [self.pool]
        self.layout: dict[str, str | int] = {"model": self.model, "dtype": "test"}

    async def prefill(self, request: Request) -> Prefilled:
        blocks = await self._take(request, len(request.prompt))
        try:
            await asyncio.sleep(self.step_seconds)
        except asyncio.CancelledError:
            self.release(request.id)
            raise
        await self._compute(request, blocks)
        self.computed += len(request.prompt)
        first, *others = (self._token(request, blocks, 0, choice) for choice in range(request.choices))
        return Prefilled(
            first, blocks, len(request.prompt) - self.cached, cached_tokens=self.cached, others=tuple(others)
        )

    async def _compute(self, request: Request, blocks: Blocks) -> None:
        ends = list(range(self.chunk, len(request.prompt), self.chunk)) if self.chunk else []
        try:
            for end in [*ends, len(request.prompt)]:
                self._partial.setdefault(request.id, Partial(request, blocks))
                if ends:
                    await self.may_step.acquire()
                self.pool.write(blocks.ids, request.prompt[:end])
                self._partial[request.id] = Partial(request, blocks, end)
        except asyncio.CancelledError:
            self.release(request.id)
            raise
        finally:
            del self._partial[request.id]

    def partial(self, request_id: str) -> Partial | None:
        return self._partial.get(request_id)

    async def reserve(self, request: Request, *, wait: bool = True) -> Blocks:
        if not wait and -(-(len(request.prompt) + request.sampling.max_tokens) // BLOCK_SIZE) > len(self._free):
            raise EngineBusy("no room", retry_after=1)
        return await self._take(request, len(request.prompt) + request.sampling.max_tokens)

    async def decode(self, request: Request, blocks: Blocks, first: Token) -> AsyncIterator[Token]:
        self.decoded.append(request.id)
        self._running += 1
        try:
            for index in range(1, request.sampling.max_tokens):
                await asyncio.sleep(self.step_seconds)
                if self.stopped:
                    yield Token(first.id, index, "abort")
                    return
                token = self._token(request, blocks, index)
                self.generated += 1
                yield token
                if token.finish:
                    return
        finally:
            self._running -= 1
            self.release(request.id)

    def release(self, request_id: str) -> None:
        self._free += self._held.pop(request_id, ())
        self._changed.set()

    def stats(self) -> Stats:
        return Stats(
            running=self._running,
            waiting=len(self._queued),
            blocks_total=self.num_blocks,
            blocks_free=len(self._free),
            prompt_tokens_computed=self.computed,
            tokens_generated=self.generated,
            steps=self.generated,
            seats_total=self.seats,
        )

    def seconds_without_progress(self) -> float:
        return self.stuck

    def start(self) -> None:
        pass

    def failure(self) -> BaseException | None:
        return self.broken

    def suspect(self) -> int:
        return 1

    def withdraw(self, request_id: str) -> bool:
        if request_id not in self._queued:
            return False
        self._queued.remove(request_id)
        self._changed.set()
        return True

    def stop(self) -> None:
        self.stopped = True

    async def _take(self, request: Request, tokens: int) -> Blocks:
        need = -(-tokens // BLOCK_SIZE)
        if need > self.num_blocks:
            raise RequestError(f"{tokens} tokens need {need} blocks, the pool has {self.num_blocks}")
        self._queued.add(request.id)
        try:
            while need > len(self._free):
                self._changed.clear()
                await self._changed.wait()
                if request.id not in self._queued:
                    raise EngineStopped(f"request {request.id} was released")
        finally:
            self._queued.discard(request.id)
        ids, self._free = tuple(self._free[:need]), self._free[need:]
        self._held[request.id] = ids
        return Blocks(0, ids)

    def _token(self, request: Request, blocks: Blocks, index: int, choice: int = 0) -> Token:
        """A letter that depends on every byte of the prompt's KV, on the choice and on the index."""
        kv = self.pool.read(blocks.ids, len(request.prompt))
        sampling = request.sampling
        letter = letter_of(kv, index, sampling.choice + choice)
        if self.no_number_at == index:
            return Token(letter, index, "error")
        if self.ends_after == index and not sampling.ignore_eos and sampling.stop_token_ids:
            return Token(min(sampling.stop_token_ids), index, "stop")
        finish: FinishReason | None = "length" if index + 1 == sampling.max_tokens else None
        if sampling.logprobs is None:
            return Token(letter, index, finish)
        # The chosen one is the second best, so that it is not always among the best.
        best = [(LETTERS[0] if letter != LETTERS[0] else LETTERS[1], -0.25), (letter, -1.5), (0xF0, -9999.0)]
        return Token(letter, index, finish, Logprobs(-1.5, tuple(best[: sampling.logprobs])))


def letter_of(kv: bytes, index: int, choice: int) -> int:
    return LETTERS[(zlib.crc32(kv + index.to_bytes(4, "little")) + choice) % len(LETTERS)]


def expected_text(prompt: Sequence[int], count: int, choice: int = 0) -> str:
    """What a FakeEngine answers to a prompt when every byte of KV arrives."""
    kv = b"".join((token + 1).to_bytes(4, "little") * (TOKEN_BYTES // 4) for token in prompt)
    return "".join(chr(letter_of(kv, index, choice)) for index in range(count))
