from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.serve.stops import StopMatcher

SHORT = st.text(alphabet="abc", min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.hit


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "hit"),
    [
        pytest.param(["hello"], [], "hello", False, id="no stop"),
        pytest.param(["hel", "lo EN", "D more"], ["END"], "hello ", True, id="across a border"),
        pytest.param(["hello EN"], ["END"], "hello EN", False, id="only its start, at the end"),
        pytest.param(["aab"], ["aab", "ab"], "", True, id="both complete at once: the longer one"),
        pytest.param(["abcd"], ["abcd", "bc"], "a", True, id="the one that is complete first"),
        pytest.param(["👩‍", "👧 x"], ["👧"], "👩‍", True, id="not ASCII"),
        pytest.param(["END"], ["END"], "", True, id="nothing before it"),
    ],
)
def test_text_ends_before_the_first_stop(pieces: list[str], stops: list[str], text: str, hit: bool) -> None:
    assert run(pieces, stops) == (text, hit)


@given(st.text(alphabet="abc", max_size=30), st.lists(SHORT, max_size=4), st.lists(st.integers(0, 30), max_size=8))
def test_borders_never_change_the_text(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert run(pieces, stops) == run(list(text), stops) == run([text], stops)


@given(st.text(alphabet="abc", max_size=30), st.lists(SHORT, min_size=1, max_size=3))
def test_no_stop_is_ever_sent(text: str, stops: list[str]) -> None:
    sent, hit = run(list(text), stops)
    assert text.startswith(sent)
    assert hit == any(stop in text for stop in stops)
    assert not any(stop in sent for stop in stops)
