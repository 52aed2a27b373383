"""Patterns that would stall a step are refused by a look at them, and the look itself is quick."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.structured import GrammarError, sources, tool_calls
from glm52_engine.structured.repeats import check_lark, shortest


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("", 0),
        ("abc", 3),
        ("a*b+c?d", 2),
        (r"\d{4}-\d{2}", 7),
        ("a{2,}|b{9}|ccc", 2),
        ("(ab|c){3}", 3),
        ("(a{5}(b|cd)?){4}", 20),
        ("(?:ab){500}{500}", 500_000),
        ("[]ab{9}]{3}", 3),
        (r"[\]a]{3}\{4}", 6),
        (r"\p{Greek}{7}", 7),
        ("(?P<name>a{3})", 3),
        ("(?i)ab", 2),
        ("a{0}b", 1),
        ("a{,5}", 0),
        ("{2}", 1),
        ("a{x}", 4),
        ("a))((", 3),
        ("[unclosed{9}", 1),
        ("a{99999999999}", 14),
    ],
)
def test_shortest(pattern: str, length: int) -> None:
    assert shortest(pattern) == length


PARTS = st.recursive(
    st.sampled_from(["a", "b", r"\.", "[cd]"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({'|'.join(options)})"),
    ),
    max_leaves=6,
)


@given(pattern=PARTS)
def test_no_text_that_matches_is_shorter(pattern: str) -> None:
    low, _ = re.compile(pattern), None
    # Python's own parser knows the bounds of a match.
    assert shortest(pattern) == re._parser.parse(low.pattern).getwidth()[0]  # type: ignore[attr-defined]


NESTED = "(ab{500}){500}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: sources.regex(NESTED),
        lambda: sources.json_schema({"properties": {"a": [{"type": "string", "pattern": NESTED}]}}),
        lambda: sources.json_schema({"patternProperties": {NESTED: {}}}),
        lambda: sources.grammar(f"start: /{NESTED}/"),
        lambda: sources.grammar("start: A\nA: B{500}\nB: /x/{500}"),
        lambda: sources.grammar("start: A\nA: B ~ 500\nB: /x/~500..600"),
        lambda: tool_calls(
            {"f": {"properties": {"a": {"type": "string", "pattern": NESTED}}}}, lambda m: 1, text=False, several=False
        ),
    ],
)
def test_what_is_refused(make: Any) -> None:
    with pytest.raises(GrammarError, match="characters; at most 10000 are possible"):
        make()


@pytest.mark.parametrize("text", ["[", "(", "{", "(?", "\\p{", "a{ ", "{1,", "[^]", "/", '"', "/\\", "~ "])
def test_the_look_takes_time_in_proportion(text: str) -> None:
    """Quadratic time would be hours, and the test would not come to its end."""
    shortest(text * 50_000)
    with contextlib.suppress(GrammarError):
        check_lark(text * 50_000)
