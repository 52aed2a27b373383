"""What crosses the border between serving (asyncio, HTTP) and the step loop (threads, tensors). No torch here."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Literal, Protocol

from glm52_engine.runtime.stored import StoreCounters
from glm52_engine.structured import Matcher

FinishReason = Literal["stop", "length", "abort", "error"]
"""`error`: the model gave no usable logits for this request, or its grammar grew too complex; its neighbours in the
batch are not concerned."""


GREEDY_BELOW = 1e-5
"""Temperatures under this one are greedy, as in vLLM: dividing by them would leave nothing but infinities."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; the defaults switch everything off but the draw itself. See `sampler`.

    `temperature` 0 is greedy. `presence_penalty` and `frequency_penalty` look at the output, `repetition_penalty` at
    prompt and output. `logit_bias`: (token id, what is added to its logit). Before output index `min_tokens` no token
    that would end the output is chosen. `logprobs`: how many of the likeliest tokens to report beside the chosen one;
    None: report nothing.

    `seed` None means a random one. Draws are keyed by (seed, choice, output index), so neither the batch nor the role
    that samples (prefill draws the first token, decode the rest) changes them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    choice: int = 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is that of the model's greatest logit, and nothing else is asked of it."""
        return (
            self.temperature < GREEDY_BELOW
            and (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0, 0, 1)
            and not self.logit_bias
            and not self.min_tokens
            and self.logprobs is None
        )


@dataclass(frozen=True, slots=True)
class Request:
    """`choices`: how many first tokens a prefill draws, for outputs that go on apart; decode has a request for each.

    `priority`: lower runs first, in order of arrival among equals. `cache_salt`: only requests with the same salt
    share KV of equal prompts, so that the time to the first token tells nobody what others asked. `constraint`: what
    may come next; the engine advances a fork of it."""

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    priority: int = 0
    cache_salt: str = ""
    choices: int = 1
    constraint: Matcher | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """KV blocks of one request in the pool of one rank, in token order."""

    rank: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities: of the chosen token, and of the likeliest ones as (token id, value), best
    first. They are the model's own: before bias, penalties, filters and temperature."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; `index` counts the output from 0. The last one of a request carries `finish`."""

    id: int
    index: int
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Result of a prefill: the first token, and the prompt's KV, held until `Engine.release(request.id)`.

    `others` are the first tokens of the choices behind the first one.
    computed_tokens + cached_tokens = tokens of the prompt; the cached ones were found in the prefix cache.
    `queued_seconds`: from the call to the seat.
    """

    token: Token
    blocks: Blocks
    computed_tokens: int
    cached_tokens: int = 0
    others: tuple[Token, ...] = ()
    queued_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Partial:
    """A prompt on its way through a prefill. `blocks`: its own until it ends, None before it has a seat.

    `kept`: leading tokens whose KV is in `pools[blocks.rank]`, and stays there as long as the blocks are its own.
    """

    request: Request
    blocks: Blocks | None = None
    kept: int = 0


QUEUE_BOUNDS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Requests before one in the queue, as `Stats.queue_positions` tells them apart."""


@dataclass(frozen=True, slots=True)
class HotCounters:
    """HiSparse of one rank or of several together, as of the last step that has ended.

    Since the start: `hits` and `misses`, tokens that full layers looked for in hot buffers; `evicted`, tokens that made
    room there; `fetched_bytes` of all layers from host memory; `switches` between contexts that lie whole and hot
    buffers. Now: `rows_held` of the `rows` of full layers' hot buffers, `frames_used` of `frames` (blocks that can lie
    whole), and `whole_ranks` whose contexts do.
    """

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    fetched_bytes: int = 0
    rows_held: int = 0
    rows: int = 0
    frames_used: int = 0
    frames: int = 0
    whole_ranks: int = 0
    switches: int = 0

    def __add__(self, other: HotCounters) -> HotCounters:
        return HotCounters(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot for metrics and /internal/v1/state. Counters only grow.

    `blocks_free` can be had at once; `blocks_cached` of them still hold a prefix that a prompt may find again.
    `prefix_cache_queries` and `prefix_cache_hits` count prompt tokens: looked for, and found.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    prompt_tokens_computed: int
    tokens_generated: int
    steps: int
    per_rank_running: Sequence[int] = field(default_factory=tuple)
    blocks_cached: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    store: StoreCounters | None = None
    """Of the store of prefixes, where this pod takes part in one."""
    hot: HotCounters | None = None
    """Of HiSparse, where decode runs with it."""
    seats_total: int = 0
    queue_blocks: int = 0
    """That all waiting requests together ask for."""
    queue_positions: Sequence[int] = (0,) * (len(QUEUE_BOUNDS) + 1)
    """How many requests came to wait behind at most so many others, by `QUEUE_BOUNDS` and above; each counted once."""
    queue_positions_sum: int = 0
    pool_bytes: int = 0
    pool_seconds: float = 0.0
    """Of the KV pools in this pod's host memory: size, and the time to touch and, for GPUs, pin them."""


class EngineBusy(Exception):
    """The queue is full; the request was not taken. `retry_after`: whole seconds in which the queue should move on."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestError(Exception):
    """This request can never run as asked (too long, bad token); the message goes to the client as a 400."""


class KvPool(Protocol):
    """One rank's KV: a page-first slab, so that a block is one contiguous run of bytes across all layers."""

    num_blocks: int
    block_bytes: int
    block_size: int
    tensor: Any
    """uint8 [num_blocks, block_bytes], contiguous, on CPU; what the transfer agent registers."""


class Engine(Protocol):
    """The step loop as the serving side sees it. Every method is called from one event loop; none blocks it."""

    pools: Sequence[KvPool]
    layout: dict[str, str | int]
    """What P and D must agree on beside the pool's geometry: model hash, dtype, rope layout, layers, version."""

    async def prefill(self, request: Request) -> Prefilled:
        """Waits for a seat and blocks, computes what the prefix cache lacks of the prompt, samples token 0.

        Raises RequestError, and EngineBusy when too many wait already. Cancelling the call frees everything it held.
        """
        ...

    def partial(self, request_id: str) -> Partial | None:
        """A prefill that waits or computes; None for one that is over, or unknown."""
        ...

    async def reserve(self, request: Request, *, wait: bool = True) -> Blocks:
        """Waits, in order, for a seat and for blocks of prompt + max_tokens: nothing is ever preempted.

        Raises RequestError and EngineBusy, the latter also where it would have to wait and shall not. Cancelling while
        waiting leaves the queue. The KV of the prompt may then be written into `pools[rank]`.
        """
        ...

    def decode(self, request: Request, blocks: Blocks, first: Token) -> AsyncIterator[Token]:
        """Continues after `first` (which is not yielded again) from the KV of the prompt already in `blocks`.

        Id and prompt are those of the request that reserved; the rest of it may have been unknown then.

        Frees seat and blocks when it ends, also when the iterator is closed early.
        """
        ...

    def release(self, request_id: str) -> None:
        """Gives back whatever `prefill` or `reserve` still holds for this request; unknown ids are ignored."""
        ...

    def withdraw(self, request_id: str) -> bool:
        """Takes a request back that has no seat yet, whose call then fails; False: it has begun, or is unknown."""
        ...

    def stats(self) -> Stats: ...

    def seconds_without_progress(self) -> float:
        """Seconds since the last finished step while work is queued; 0.0 when idle. What /livez reports."""
        ...

    def start(self) -> None: ...

    def failure(self) -> BaseException | None:
        """The exception that ended a rank's loop, if one did: the process then leaves with outcome Crashed."""
        ...

    def suspect(self) -> int:
        """The rank that `failure` or `seconds_without_progress` speaks of."""
        ...

    def stop(self) -> None:
        """Joins the rank threads and releases the pools; running requests end with finish 'abort'."""
        ...
