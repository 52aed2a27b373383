"""Logits → tokens, all rows of a step together.

The order is vLLM's: log probabilities are those of the model itself; then tokens are forbidden (first by a grammar) and
biased, then penalised. Greedy rows take the greatest logit of that; the others divide by the temperature, drop what
min_p, top_k and top_p exclude, and draw. A draw depends on (seed, choice, output index) alone, never on the batch it
happened to run in.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from glm52_engine.runtime.types import GREEDY_BELOW, FinishReason, Logprobs, Sampling, Token
from glm52_engine.structured import GrammarError, Matcher
from glm52_engine.structured.masks import forbid

log = logging.getLogger(__name__)

CANDIDATES = 1024
"""Of so many likeliest tokens a filtered row is drawn; a row whose filters keep more is sorted as a whole."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A token to choose: from which row of the logits, for which seat, how, and its place in the output.

    `shared`: the seat has further choices in this step, and no step behind it."""

    row: int
    seat: int
    sampling: Sampling
    seed: int
    index: int
    choice: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class _Seat:
    """What does not change while a sequence runs: its bias and the tokens that would end it, as (id, value) pairs."""

    ids: torch.Tensor
    values: torch.Tensor
    end_ids: torch.Tensor
    penalised: bool

    def additions(self, *, early: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if not early:
            return self.ids, self.values
        never = torch.full((len(self.end_ids),), -math.inf)
        return torch.cat([self.ids, self.end_ids]), torch.cat([self.values, never])


class Sampler:
    """The sampler of one rank; `begin` a seat before its first token.

    No id at or above `vocab_bound` is ever chosen: the padding of the vocabulary behind it is no text.
    """

    def __init__(self, *, seats: int, vocab_bound: int, eos_ids: frozenset[int]) -> None:
        self._bound = vocab_bound
        self.eos_ids = eos_ids
        self._seats: list[_Seat | None] = [None] * seats
        self._matchers: list[Matcher | None] = [None] * seats
        self._history = _History(seats, vocab_bound)

    @torch.inference_mode()
    def begin(
        self,
        seat: int,
        sampling: Sampling,
        prompt: Sequence[int],
        output: Sequence[int],
        constraint: Matcher | None = None,
    ) -> None:
        """A sequence takes the seat; `output` is what it has generated elsewhere, which `constraint` has taken in."""
        self._matchers[seat] = None if constraint is None else constraint.fork()
        ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self.eos_ids)
        bias = [pair for pair in sampling.logit_bias if pair[0] < self._bound]
        penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0, 0, 1)
        self._seats[seat] = _Seat(
            torch.tensor([token for token, _ in bias], dtype=torch.int64),
            torch.tensor([value for _, value in bias], dtype=torch.float32),
            torch.tensor(sorted(end for end in ends if end < self._bound), dtype=torch.int64),
            penalised,
        )
        if penalised:
            self._history.begin(seat, prompt, output)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Token]:
        """logits float32 [rows, vocab_size] → a token for each draw; its finish is `error` where a row is no number."""
        rows = [draw.row for draw in draws]
        plain = logits[:, : self._bound]
        if rows != list(range(len(logits))):
            plain = plain[rows]
        adjusted = self._adjusted(plain, draws)
        # A NaN is the maximum wherever there is one.
        best, chosen = adjusted.max(dim=1)
        random = [place for place, draw in enumerate(draws) if draw.sampling.temperature >= GREEDY_BELOW]
        if random:
            chosen[random] = _drawn(adjusted[random], [draws[place] for place in random])
        self._count(draws, chosen)
        ids: list[int] = chosen.tolist()
        if any(self._matchers[draw.seat] for draw in draws):
            # A grammar may forbid the very token whose logit is no number.
            best = best + plain.max(dim=1).values
        finite: list[bool] = best.isfinite().tolist()
        sound = [fine and self._follows(draw, token) for fine, draw, token in zip(finite, draws, ids, strict=True)]
        logprobs = _logprobs(plain, chosen, draws)
        return [
            Token(
                token,
                draw.index,
                finish_of(token, draw.index, draw.sampling, self.eos_ids) if fine else "error",
                logprobs.get(place) if fine else None,
            )
            for place, (token, draw, fine) in enumerate(zip(ids, draws, sound, strict=True))
        ]

    def _adjusted(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """The one place where logits change before a token is chosen: bias and forbidden tokens, then penalties."""
        additions, penalised = {}, []
        matchers = [self._matchers[draw.seat] for draw in draws]
        for place, (draw, matcher) in enumerate(zip(draws, matchers, strict=True)):
            seat = self._seats[draw.seat]
            if seat is None:
                raise RuntimeError(f"seat {draw.seat} was never begun")
            # Where a grammar is at its end no minimum can be met.
            early = draw.index < draw.sampling.min_tokens and not (matcher and matcher.ended)
            if draw.sampling.logit_bias or early:
                additions[place] = seat.additions(early=early)
            if seat.penalised:
                penalised.append(place)
        if additions or penalised or any(matchers):
            logits = logits.clone()
        forbid(logits, matchers)
        if additions:
            counts = torch.tensor([len(ids) for ids, _ in additions.values()])
            rows = torch.tensor(list(additions)).repeat_interleave(counts)
            ids, values = (torch.cat(column) for column in zip(*additions.values(), strict=True))
            to = logits.device
            logits.index_put_((rows.to(to), ids.to(to)), values.to(to, logits.dtype), accumulate=True)
        if penalised:
            logits[penalised] = self._history.penalise(logits[penalised], [draws[place] for place in penalised])
        return logits

    def _follows(self, draw: Draw, token: int) -> bool:
        """Advances the grammar of the seat, if it has one; False where it cannot go on."""
        matcher = self._matchers[draw.seat]
        if matcher is None:
            return True
        try:
            matcher.check()
            # The first tokens of several choices leave the seat where it was: each goes on elsewhere.
            if not draw.shared and not finish_of(token, draw.index, draw.sampling, self.eos_ids):
                matcher.accept(token)
        except GrammarError as error:
            log.warning("%s", error)
            return False
        return True

    def _count(self, draws: Sequence[Draw], chosen: torch.Tensor) -> None:
        places = [place for place, draw in enumerate(draws) if (seat := self._seats[draw.seat]) and seat.penalised]
        if places:
            self._history.add([draws[place].seat for place in places], chosen[places])


class _History:
    """Which tokens each seat has met, in tables of a row for a seat that exist once anybody asks for a penalty."""

    def __init__(self, seats: int, vocab_bound: int) -> None:
        self._shape = (seats, vocab_bound)
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None

    def begin(self, seat: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        counts, seen = self._tables(torch.device("cpu") if self._counts is None else self._counts.device)
        counts[seat] = 0
        seen[seat] = False
        known = torch.tensor([token for token in (*prompt, *output) if token < self._shape[1]], dtype=torch.int64)
        seen[seat, known.to(seen.device)] = True
        self.add([seat] * len(output), torch.tensor(list(output), dtype=torch.int64))

    def add(self, seats: Sequence[int], tokens: torch.Tensor) -> None:
        counts, seen = self._tables(tokens.device if self._counts is None else self._counts.device)
        rows, tokens = torch.tensor(list(seats), dtype=torch.int64, device=counts.device), tokens.to(counts.device)
        counts.index_put_((rows, tokens), torch.ones(len(tokens), device=counts.device), accumulate=True)
        seen[rows, tokens] = True

    def penalise(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        """logits [N, vocab_bound] → the same, repetition first; OpenAI's formula for the other two."""
        counts, seen = self._tables(logits.device)
        seats = torch.tensor([draw.seat for draw in draws], device=logits.device)
        repetition = _column(draws, "repetition_penalty", logits)
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen[seats], scaled, logits)
        met = counts[seats]
        frequency = _column(draws, "frequency_penalty", logits) * met
        return logits - frequency - _column(draws, "presence_penalty", logits) * (met > 0)

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(self._shape, device=device)
            self._seen = torch.zeros(self._shape, dtype=torch.bool, device=device)
        elif self._counts.device != device:
            self._counts, self._seen = self._counts.to(device), self._seen.to(device)
        return self._counts, self._seen


def finish_of(token: int, index: int, sampling: Sampling, eos_ids: frozenset[int]) -> FinishReason | None:
    """Why the output ends with this token, if it does."""
    if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
        return "stop"
    return "length" if index + 1 >= sampling.max_tokens else None


def _column(draws: Sequence[Draw], name: str, like: torch.Tensor) -> torch.Tensor:
    """One field of every draw's sampling as [N, 1]."""
    values = [[getattr(draw.sampling, name)] for draw in draws]
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def _logprobs(logits: torch.Tensor, chosen: torch.Tensor, draws: Sequence[Draw]) -> dict[int, Logprobs]:
    """By place among the draws, for those that ask."""
    counts = {place: draw.sampling.logprobs for place, draw in enumerate(draws) if draw.sampling.logprobs is not None}
    if not counts:
        return {}
    places = list(counts)
    # Nothing infinite leaves: JSON has no word for it. The bound is vLLM's.
    logprobs = logits[places].log_softmax(dim=1).clamp(min=-9999.0)
    own: list[float] = logprobs.gather(1, chosen[places].unsqueeze(1)).squeeze(1).tolist()
    values, ids = logprobs.topk(min(max(counts.values()), logprobs.shape[1]), dim=1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return {
        place: Logprobs(value, tuple(top[: counts[place]])) for place, value, top in zip(places, own, tops, strict=True)
    }


def _drawn(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """logits [N, vocab_bound] → N ids by the inverse of the cumulative distribution, in float64."""
    logits = logits.double()
    scaled = logits / _column(draws, "temperature", logits)
    uniform = torch.tensor([[_uniform(draw)] for draw in draws], dtype=torch.float64, device=logits.device)
    filtered = [place for place, draw in enumerate(draws) if _filters(draw.sampling)]
    if not filtered:
        return _place(scaled.softmax(dim=1).cumsum(dim=1), uniform)
    chosen = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    free = sorted(set(range(len(draws))) - set(filtered))
    if free:
        chosen[free] = _place(scaled[free].softmax(dim=1).cumsum(dim=1), uniform[free])
    chosen[filtered] = _drawn_filtered(scaled[filtered], uniform[filtered], [draws[place] for place in filtered])
    return chosen


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _drawn_filtered(scaled: torch.Tensor, uniform: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Over the tokens from likely to unlikely, of which every filter keeps the first ones."""
    size = scaled.shape[1]
    chosen, certain = _drawn_of(scaled, uniform, draws, min(CANDIDATES, size))
    if size <= CANDIDATES or bool(certain.all()):
        return chosen
    rest: list[int] = (~certain).nonzero().squeeze(1).tolist()
    chosen[rest] = _drawn_of(scaled[rest], uniform[rest], [draws[place] for place in rest], size)[0]
    return chosen


def _drawn_of(
    scaled: torch.Tensor, uniform: torch.Tensor, draws: Sequence[Draw], size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids drawn from the `size` likeliest tokens, and whether all the tokens that the filters keep are among these."""
    ids = _likeliest(scaled, size)
    values, order = scaled.gather(1, ids).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    shares = (values - scaled.logsumexp(dim=1, keepdim=True)).exp()
    cumulative = shares.cumsum(dim=1)
    min_p, top_k, top_p = (_column(draws, name, scaled) for name in ("min_p", "top_k", "top_p"))
    limited = (min_p > 0) | (top_k > 0)
    by_min_p = (values >= values[:, :1] + min_p.log()).sum(dim=1, keepdim=True)
    limit = torch.where(top_k > 0, torch.minimum(by_min_p, top_k.long()), by_min_p)
    mass = torch.where(limited, cumulative.gather(1, limit.clamp(min=1) - 1), 1.0)
    # The token that crosses top_p stays in, so that at least one always does.
    below = cumulative - shares < top_p * mass
    kept = torch.minimum(below.sum(dim=1, keepdim=True), limit).clamp(min=1)
    last = values.gather(1, kept - 1)
    # Equal logits at the border may have fallen out of the candidates: only a strictly greater one is certain.
    certain = (last > values[:, -1:]) & ((limit < size) | ~limited)
    inside = torch.arange(size, device=scaled.device) < kept
    drawn = _place(torch.where(inside, cumulative, cumulative.gather(1, kept - 1)), uniform)
    return ids.gather(1, drawn.unsqueeze(1)).squeeze(1), certain.squeeze(1)


def _likeliest(scaled: torch.Tensor, size: int) -> torch.Tensor:
    """Ids of the `size` greatest values of each row, in ascending order: a stable sort then lets the lowest id win."""
    if size == scaled.shape[1]:
        return torch.arange(size, device=scaled.device).expand(scaled.shape)
    return scaled.topk(size, dim=1, sorted=False).indices.sort(dim=1).values


def _place(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First place [N] whose cumulative share [N, M] exceeds `uniform` [N, 1] of the whole: it has a share itself."""
    total = cumulative[:, -1:]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    places = torch.searchsorted(cumulative.contiguous(), target, right=True).squeeze(1)
    # Rows that are no numbers find no place; the caller knows them by their maximum.
    return places.clamp(max=cumulative.shape[1] - 1)


def _uniform(draw: Draw) -> float:
    """In [0, 1), from a hash: the same on every machine and for every version of torch."""
    digest = hashlib.blake2b(f"{draw.seed}:{draw.choice}:{draw.index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)
