from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.serve.stops import StopMatcher

SHORT = st.text(alphabet="abc", min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str], *, include: bool = False, unarmed: int = 0) -> tuple[str, str | None]:
    """`unarmed`: so many pieces in front may hold what they like."""
    matcher = StopMatcher(stops, include=include)
    text = "".join(matcher.push(piece, armed=place >= unarmed) for place, piece in enumerate(pieces))
    return text + matcher.flush(), matcher.hit


def oracle(text: str, stops: list[str], *, include: bool, after: int) -> tuple[str, str | None]:
    """At every end of the text: is it a stop? The first end wins, then the longest stop."""
    for end in range(after + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "hit"),
    [
        pytest.param(["hello"], [], "hello", None, id="no stop"),
        pytest.param(["hel", "lo EN", "D more"], ["END"], "hello ", "END", id="across a border"),
        pytest.param(["hello EN"], ["END"], "hello EN", None, id="only its start, at the end"),
        pytest.param(["aab"], ["aab", "ab"], "", "aab", id="both complete at once: the longer one"),
        pytest.param(["abcd"], ["abcd", "bc"], "a", "bc", id="the one that is complete first"),
        pytest.param(["👩‍", "👧 x"], ["👧"], "👩‍", "👧", id="not ASCII"),
        pytest.param(["END"], ["END"], "", "END", id="nothing before it"),
    ],
)
def test_text_ends_before_the_first_stop(pieces: list[str], stops: list[str], text: str, hit: str | None) -> None:
    assert run(pieces, stops) == (text, hit)


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(SHORT, max_size=4),
    st.lists(st.integers(0, 30), max_size=8),
    st.booleans(),
    st.integers(0, 3),
)
def test_borders_never_change_the_text(
    text: str, stops: list[str], cuts: list[int], include: bool, unarmed: int
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    expected = oracle(text, stops, include=include, after=len("".join(pieces[:unarmed])))
    assert run(pieces, stops, include=include, unarmed=unarmed) == expected


def test_a_stop_may_begin_where_none_was_looked_for_yet() -> None:
    assert run(["aba", "ba"], ["aba"], unarmed=1) == ("ab", "aba"), "the two overlap"
    assert run(["aab", "b"], ["ab"], unarmed=1) == ("aabb", None)


@pytest.mark.parametrize("include", [False, True])
def test_every_split_of_a_text_into_two(include: bool) -> None:
    text, stops = "one\n\nUser: two 👧\n\nUser:x", ["\n\nUser:", "👧"]
    whole = run([text], stops, include=include)
    assert whole == ("one\n\nUser:" if include else "one", "\n\nUser:")
    assert all(run([text[:cut], text[cut:]], stops, include=include) == whole for cut in range(len(text) + 1))
    assert run(list(text), stops, include=include) == whole


@given(st.text(alphabet="abc", max_size=30), st.lists(SHORT, min_size=1, max_size=3))
def test_what_is_sent_is_never_taken_back(text: str, stops: list[str]) -> None:
    matcher, sent = StopMatcher(stops), ""
    for place, character in enumerate(text, start=1):
        sent += matcher.push(character)
        held = text[:place].removeprefix(sent)
        assert text.startswith(sent)
        assert matcher.hit or not held or any(stop.startswith(held) for stop in stops), "held back without need"
    assert (matcher.hit is not None) == any(stop in text for stop in stops)
    assert not any(stop in sent for stop in stops)
