"""Our model on one sequence at a time, and the published model code beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from glm52_engine.checkpoint import load_weights, read_model_spec
from glm52_engine.config import KvCacheDtype
from glm52_engine.kv import KvLayout, Pool
from glm52_engine.model import Model, Span, build_step

BLOCK = 16
SEATS = 4
BLOCKS_PER_SEAT = 40

TOLERANCE = 1e-3
"""Greatest difference of a logit (their standard deviation is 18) that rounding in float32 may make."""


class Ours:
    """A model with a pool whose block tables are shuffled, so that no test passes by block order."""

    def __init__(self, checkpoint: Path, *, kv_cache_dtype: KvCacheDtype = "auto", **misread: Any) -> None:
        """`misread`: fields of the spec that the model gets wrong on purpose."""
        spec = read_model_spec(checkpoint)
        weights = load_weights(checkpoint, spec).tensors
        spec = dataclasses.replace(spec, **misread)
        self.model = Model(spec, weights)
        self.pool = Pool(KvLayout.of(spec, BLOCK, kv_cache_dtype), SEATS * BLOCKS_PER_SEAT)
        self.pool.touch()
        order = torch.randperm(self.pool.num_blocks, generator=torch.Generator().manual_seed(1))
        self.tables = order.view(SEATS, BLOCKS_PER_SEAT)

    def step(self, spans: Sequence[Span], trace: list[torch.Tensor] | None = None) -> torch.Tensor:
        return self.model.forward(build_step(spans, self.tables, BLOCK), self.pool, trace=trace)

    def all_logits(self, ids: Sequence[int], trace: list[torch.Tensor] | None = None) -> torch.Tensor:
        """[len(ids), vocab]: the whole sequence in one step."""
        step = build_step([Span(0, 0, ids, True)], self.tables, BLOCK)
        step = dataclasses.replace(step, logit_rows=torch.arange(len(ids)))
        return self.model.forward(step, self.pool, trace=trace)

    def prefill(self, ids: Sequence[int], *, chunk: int, seat: int = 0) -> torch.Tensor:
        """[vocab]: the logits of the last token."""
        logits = torch.empty(0)
        for start in range(0, len(ids), chunk):
            logits = self.step([Span(seat, start, ids[start : start + chunk], True)])
        return logits[0]

    def greedy(self, ids: Sequence[int], count: int, *, chunk: int) -> list[int]:
        """`count` tokens after a prefill in chunks."""
        logits = self.prefill(ids, chunk=chunk)
        tokens: list[int] = []
        for position in range(len(ids), len(ids) + count):
            tokens.append(int(logits.argmax()))
            logits = self.step([Span(0, position, [tokens[-1]], True)])[0]
        return tokens


class Theirs:
    """`GlmMoeDsaForCausalLM` of the same checkpoint, plain attention and experts, and what its indexers did last.

    `selected`: per layer [T, K]; `scores`: per full layer float32 [T, T], -inf (or next to it) after the row's token.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import GlmMoeDsaForCausalLM

        loaded: Any = GlmMoeDsaForCausalLM.from_pretrained(
            checkpoint,
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        self.model, self.info = loaded
        self.model.eval()
        self.selected: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []
        for layer in self.model.model.layers:
            layer.self_attn.register_forward_hook(lambda module, args, out: self.selected.append(out[2][0]))

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> torch.Tensor:
        self.selected.clear()
        with _TopKInputs(len(ids)) as seen:
            logits: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0]
        self.scores = seen.scores
        return logits


class _TopKInputs(TorchFunctionMode):
    """Keeps what `Tensor.topk` is called with where that is a score of every token for every token."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._shape = (1, length, length)
        self.scores: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk and args[0].shape == self._shape:
            self.scores.append(args[0][0].clone())
        return func(*args, **(kwargs or {}))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random printable bytes."""
    draws = torch.randint(0x20, 0x7F, (length,), generator=torch.Generator().manual_seed(seed))
    ids: list[int] = draws.tolist()
    return ids
