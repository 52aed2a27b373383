"""Bytes of a peer: whole messages come through, anything else is a named error and never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.ranks.frames import HANDSHAKE_BYTES, MARK, MOST_BYTES, ProtocolError, frame, read_frame
from glm52_engine.ranks.messages import (
    Beat,
    Challenge,
    Done,
    Failed,
    Flags,
    Order,
    RankOrder,
    RankResult,
    Shape,
    Start,
    decode,
    encode,
)
from glm52_engine.runtime.rank import Event
from glm52_engine.runtime.types import Logprobs, Sampling, Token


def read(data: bytes, limit: int = HANDSHAKE_BYTES) -> bytes | None:
    async def inner() -> bytes | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader, limit)

    return asyncio.run(inner())


@given(st.binary(max_size=2000))
def test_a_frame_comes_back(payload: bytes) -> None:
    assert read(frame(payload)) == payload


def test_the_end_between_two_frames_is_no_error() -> None:
    assert read(b"") is None


@given(st.binary(max_size=200), st.data())
def test_a_frame_that_is_cut_says_where(payload: bytes, data: st.DataObject) -> None:
    whole = frame(payload)
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(ProtocolError, match="ended within"):
        read(whole[:cut])


def test_a_frame_beyond_the_bound_is_refused_before_it_is_read() -> None:
    header = MARK + (HANDSHAKE_BYTES + 1).to_bytes(4, "big")
    with pytest.raises(ProtocolError, match=f"{HANDSHAKE_BYTES + 1} bytes"):
        read(header)
    with pytest.raises(ProtocolError, match="at most"):
        frame(bytes(MOST_BYTES + 1))


@given(st.binary(min_size=8, max_size=100).filter(lambda data: data[:4] != MARK))
def test_another_protocol_is_known_by_its_first_bytes(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="another protocol"):
        read(data)


@given(st.binary(max_size=300))
def test_garbage_is_no_message(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


@given(st.data())
def test_one_changed_byte_is_an_error_or_another_message_and_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(encode(Challenge(1, "ab" * 16)))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode(bytes(whole)), Challenge)


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (encode(Beat()) + b" {}", "trailing"),
        (b'{"kind":"beat","more":1}', "more"),
        (b'{"kind":"done","number":"3","ranks":[]}', "number"),
        (b'{"kind":"evil"}', "evil"),
        (b'{"kind":"failed"}', "reason"),
    ],
)
def test_a_wrong_message_is_refused_by_its_field(payload: bytes, named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        decode(payload)


def test_a_refusal_does_not_quote_a_peer_at_length() -> None:
    with pytest.raises(ProtocolError) as refused:
        decode(b'{"kind":"' + b"x" * 10_000 + b'"}')
    assert len(str(refused.value)) <= 300


def test_messages_come_back_as_they_were() -> None:
    sampling = Sampling(5, seed=3, stop_token_ids=frozenset({3}), logit_bias=((1, -2.5),))
    token = Token(5, 0, "stop", Logprobs(-math.inf, ((1, -0.5),)))
    start = Start("a#1", 0, (1, 2), (5, 6), sampling, 7, False, 0, 1, 0, token)
    part = RankOrder((start,), ("b#2",), ((0, 1),))
    for message in (
        Order(Shape(1, 4, (1, 2), Flags(True)), (part, RankOrder())),
        Done(1, (RankResult((-1, 7), (Event("a#1", token, True, 2, (token,)),)),)),
        Failed("no 'mem\u00f6ry'"),
    ):
        assert decode(encode(message)) == message
