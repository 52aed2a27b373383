"""Small engines (pools of kilobytes) and what the serving side does with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from glm52_engine.checkpoint import load_weights, read_model_spec
from glm52_engine.config import KvCacheDtype
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.model import Model
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.executor import HostExecutor
from glm52_engine.runtime.load import kv_contract
from glm52_engine.runtime.rank import StepLimits
from glm52_engine.runtime.types import Blocks, Prefilled, Request, Sampling, Token
from glm52_engine.schedule import Limits, blocks_for
from glm52_engine.tokenizer import decodable_bound, eos_token_ids

BLOCK = 16
DEADLINE = 30.0


class Maker:
    """Engines that share one model, as the ranks of a pod do."""

    def __init__(self, checkpoint: Path) -> None:
        self.spec = read_model_spec(checkpoint)
        self.weights = load_weights(checkpoint, self.spec)
        self.model = Model(self.spec, self.weights.tensors)
        self.bound = decodable_bound(checkpoint)
        self.eos = eos_token_ids(checkpoint)

    def make(
        self,
        *,
        ranks: int = 1,
        seats: int = 8,
        blocks: int = 64,
        max_model_len: int = 512,
        step_tokens: int = 64,
        eos_ids: frozenset[int] | None = None,
        vocab_bound: int | None = None,
        model: Any = None,
        max_waiting: int = 100,
        prefix_cache: bool = True,
        launch_ahead: bool = False,
        kv_cache_dtype: KvCacheDtype = "auto",
        executor: type[HostExecutor] = HostExecutor,
    ) -> LocalEngine:
        kv = KvLayout.of(self.spec, BLOCK, kv_cache_dtype)
        pools = [Pool(kv, blocks) for _ in range(ranks)]
        for pool in pools:
            pool.touch()
        step = StepLimits(step_tokens, 16, vocab_bound or self.bound, self.eos if eos_ids is None else eos_ids)
        return LocalEngine(
            [
                executor(
                    model or self.model,
                    pool,
                    seats=seats,
                    blocks_per_seat=blocks_for(max_model_len, BLOCK),
                    vocab_bound=step.vocab_bound,
                )
                for pool in pools
            ],
            limits=Limits(max_model_len, BLOCK, seats, blocks, self.spec.vocab_size, max_waiting),
            step=step,
            layout=kv_contract(kv, self.weights),
            prefix_cache=prefix_cache,
            launch_ahead=launch_ahead,
        )

    @asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[LocalEngine]:
        engine = self.make(**options)
        engine.start()
        try:
            yield engine
        finally:
            engine.stop()


def greedy(name: str, prompt: tuple[int, ...], max_tokens: int, **sampling: Any) -> Request:
    return Request(name, prompt, Sampling(**{"max_tokens": max_tokens, "temperature": 0.0, **sampling}))


def copy_blocks(source: LocalEngine, prefilled: Prefilled, target: LocalEngine, blocks: Blocks) -> None:
    """What the transfer does: raw bytes, block by block, in token order."""
    ids = prefilled.blocks.ids
    target.pools[blocks.rank].tensor[list(blocks.ids[: len(ids)])] = source.pools[prefilled.blocks.rank].tensor[
        list(ids)
    ]


async def hand_over(source: LocalEngine, target: LocalEngine, request: Request) -> tuple[Blocks, Token]:
    """Prefill on one engine, its KV in the other one, the source released."""
    prefilled = await source.prefill(request)
    blocks = await target.reserve(request)
    copy_blocks(source, prefilled, target, blocks)
    source.release(request.id)
    return blocks, prefilled.token


async def generate(source: LocalEngine, target: LocalEngine, request: Request) -> list[Token]:
    blocks, first = await hand_over(source, target, request)
    return [first] + [token async for token in target.decode(request, blocks, first)]


async def eventually(condition: Callable[[], bool], *, within: float = DEADLINE) -> None:
    """Waits until the condition holds; fails after a deadline."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        # Not a spin: that would keep the interpreter lock from the ranks' threads.
        await asyncio.sleep(0.002)


def idle(engine: LocalEngine) -> bool:
    """Whether nothing runs, waits or is held; the books must balance at any time."""
    engine.check_integrity()
    stats = engine.stats()
    return (stats.running, stats.waiting) == (0, 0) and stats.blocks_free == stats.blocks_total
