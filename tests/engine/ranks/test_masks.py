"""Grammars that advance where the coordinator is: every token drawn under one had its mask, and one that cannot go on
ends its request only."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any, cast

import pytest

from glm52_engine.ranks.books import Books
from glm52_engine.ranks.follower import OrderError
from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.ranks.masks import GivenMask
from glm52_engine.ranks.messages import Flags, Mask, RankOrder, RankResult, Shape
from glm52_engine.runtime.rank import Event, Running
from glm52_engine.runtime.types import Sampling, Token
from glm52_engine.structured import GrammarError, Matcher
from tests.engine.ranks.simulated import BLOCK, STEP, Replica
from tests.engine.ranks.test_lockstep import START


class Counting:
    """A matcher whose masks are numbered, and which cannot take the token 13."""

    ended = False

    def __init__(self, accepted: list[int]) -> None:
        self.accepted = accepted

    def fork(self) -> Counting:
        return Counting(list(self.accepted))

    def mask(self) -> bytes:
        return len(self.accepted).to_bytes(4, "little")

    def check(self) -> None: ...

    def accept(self, token: int) -> None:
        if token == 13:
            raise GrammarError("the output left its grammar")
        self.accepted.append(token)


def books_of(prompt: tuple[int, ...], **more: Any) -> tuple[Books, Counting]:
    books, matcher = Books(1, limits=STEP, block_size=BLOCK, launch_ahead=True), Counting([])
    sampling = Sampling(8, temperature=0.0)
    constraint = cast(Matcher, matcher)
    books.start(0, Running("k", 0, (0, 1, 2), prompt, sampling, 0, False, constraint=constraint, **more))
    return books, matcher


def masks(books: Books) -> list[int]:
    planned = books.next()
    assert planned is not None
    assert not planned[0].flags.lease
    return [int.from_bytes(base64.b64decode(mask.bits), "little") for mask in planned[1][0].masks]


def test_a_mask_goes_with_each_token_and_with_no_chunk_before() -> None:
    books, given = books_of(tuple(range(1, 8)))
    assert masks(books) == [], "the first 6 of 7 tokens"
    books.settle([RankResult((-1,), (Event("k", None, False, 6),))])
    assert masks(books) == [0]
    books.settle([RankResult((5,))])
    assert masks(books) == [1]
    books.settle([RankResult((6,))])
    assert masks(books) == [2]
    assert given.accepted == [], "the caller's own is left as it was"


def test_a_grammar_that_cannot_go_on_ends_its_request_with_an_error() -> None:
    books, _ = books_of((1, 2))
    masks(books)
    ((event,),) = books.settle([RankResult((13,))])
    assert event.token == Token(13, 0, "error")
    assert not event.ended, "the rank still has it"
    planned = books.next()
    assert planned is not None
    assert planned[1] == [RankOrder(aborts=("k",))]
    books.settle([RankResult((), (Event("k", None, True, 2),))])
    assert books.idle


def test_a_last_token_that_the_grammar_does_not_take_in_stays_the_last() -> None:
    books, _ = books_of((1, 2))
    masks(books)
    ((event,),) = books.settle([RankResult((-1,), (Event("k", Token(13, 0, "stop"), True, 2),))])
    assert event.token == Token(13, 0, "stop")
    assert books.idle


def test_a_rank_draws_no_token_without_its_mask() -> None:
    constrained = replace(START, constrained=True)
    shape = Shape(1, 4, (3,), Flags(prefill=True))
    replica = Replica(1, launch_ahead=False)
    with pytest.raises(OrderError, match="k draws a token without its mask"):
        replica.ranks[0].execute(shape, RankOrder((constrained,), (), ((0, 3),)))
    replica = Replica(1, launch_ahead=False)
    with pytest.raises(OrderError, match="a mask for seat 0, which has no grammar"):
        replica.ranks[0].execute(shape, RankOrder((START,), (), ((0, 3),), (Mask(0, "AAAA", False),)))


def test_a_mask_is_for_one_token() -> None:
    given = GivenMask()
    given.give(Mask(0, base64.b64encode(b"\x01\0\0\0").decode(), True))
    assert (given.mask(), given.mask_bytes, given.ended, given.given) == (b"\x01\0\0\0", 4, True, True)
    given.accept(0)
    assert not given.given


@pytest.mark.parametrize("bits", ["", "AAA", "AAAA", "?"])
def test_bits_that_are_no_mask_are_refused(bits: str) -> None:
    with pytest.raises(ProtocolError, match="mask"):
        GivenMask().give(Mask(0, bits, False))
