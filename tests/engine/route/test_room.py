from __future__ import annotations

import pytest

from glm52_engine.route.room import Room
from glm52_engine.serve.errors import ApiError
from glm52_engine.serve.fields import MAX_BODY_BYTES
from glm52_engine.sizing import ROUTER_MEMORY


def test_what_is_taken_is_given_back_however_it_ends() -> None:
    room = Room(100)

    def fails() -> None:
        with room.take(60):
            assert room.taken == 60
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert room.taken == 0


def test_only_the_real_size_counts_once_it_is_known() -> None:
    room = Room(100)
    with room.take(90) as settle:
        settle(10)
        with room.take(90):
            assert room.taken == 100
    assert room.taken == 0


def test_what_does_not_fit_is_told_when_to_come_back_and_takes_nothing() -> None:
    room = Room(100)
    with room.take(60), pytest.raises(ApiError) as caught, room.take(41):
        pass
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "too_many_bytes", 2)
    assert room.taken == 0


def test_the_bodies_fit_the_memory_that_the_router_gets() -> None:
    """The operator asks for ROUTER_MEMORY; the process alone takes a quarter of it."""
    assert 4 * MAX_BODY_BYTES <= Room().limit <= ROUTER_MEMORY // 2
