"""Masks of the rows that have a grammar, applied to the logits of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import llguidance
import torch

from glm52_engine.structured.matcher import Matcher


def forbid(logits: torch.Tensor, matchers: Sequence[Matcher | None]) -> None:
    """Set to -inf, in place, what the grammars do not allow: logits [N, V], a matcher or None for each row.

    Rows without one cost nothing. Ids at and above the tokenizer's bound are forbidden in the others.
    """
    rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
    if not rows:
        return
    # Choices of one prompt draw their first tokens from one matcher, and no matcher may work on two masks at once.
    distinct = {id(matcher): matcher for matcher in matchers if matcher is not None}
    words = _fill(list(distinct.values())).to(logits.device, non_blocking=True)
    if len(distinct) < len(rows):
        places = {key: place for place, key in enumerate(distinct)}
        words = words[[places[id(matchers[row])] for row in rows]]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((words.unsqueeze(2) >> bits) & 1).flatten(1) == 0
    width = min(logits.shape[1], forbidden.shape[1])
    index = torch.tensor(rows, device=logits.device)
    chosen = logits[index]
    chosen[:, :width].masked_fill_(forbidden[:, :width], -torch.inf)
    chosen[:, width:] = -torch.inf
    logits[index] = chosen


def _fill(matchers: Sequence[Matcher]) -> torch.Tensor:
    """int32 [len(matchers), ceil(vocabulary / 32)] on the CPU, a bit for each token that may come next."""
    size = matchers[0].mask_bytes
    words = torch.empty(len(matchers), size // 4, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    computed = []
    for row, matcher in enumerate(matchers):
        if matcher.reasons:
            words[row] = torch.frombuffer(bytearray(matcher.mask()), dtype=torch.int32)
        else:
            computed.append((matcher.raw, row))
    if len(computed) == 1:
        raw, row = computed[0]
        raw.unsafe_compute_mask_ptr(words[row].data_ptr(), size)
    elif computed:
        _executor().unsafe_compute_mask_ptr(computed, words.data_ptr(), size, len(matchers))
    return words


@cache
def _executor() -> llguidance.LLExecutor:
    """A mask takes 10 µs to 3 ms: with many rows, one after the other would be longer than the step itself."""
    return llguidance.LLExecutor()
