"""Who has which ranks and experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.ranks.spans import LOCAL, RankHost, RankSpan, experts_of, rank_spans


def hosts_of(counts: list[int]) -> list[RankHost]:
    return [RankHost(f"host-{place}", 9000, count) for place, count in enumerate(counts)]


def test_local_ranks_come_first_then_the_hosts_as_given() -> None:
    spans = rank_spans(2, [RankHost("b", 9000, 3), RankHost("a", 9000, 1)])
    assert spans == [RankSpan(LOCAL, 0, 2), RankSpan("b:9000", 2, 3), RankSpan("a:9000", 5, 1)]


def test_no_remote_host_is_one_span() -> None:
    assert rank_spans(4, []) == [RankSpan(LOCAL, 0, 4)]


@given(st.integers(1, 16), st.lists(st.integers(1, 16), max_size=8))
def test_spans_are_contiguous_and_have_every_rank_once(local: int, counts: list[int]) -> None:
    spans = rank_spans(local, hosts_of(counts))
    assert [rank for span in spans for rank in span.ranks] == list(range(local + sum(counts)))


@pytest.mark.parametrize(
    ("local", "hosts", "named"),
    [
        (0, [RankHost("a", 1, 1)], "local"),
        (1, [RankHost("a", 1, 0)], "a:1"),
        (1, [RankHost("a", 1, 1), RankHost("a", 1, 2)], "a:1: named twice"),
    ],
)
def test_what_is_no_replica_is_refused_by_name(local: int, hosts: list[RankHost], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rank_spans(local, hosts)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.integers(1, 256))
def test_each_expert_has_one_rank_and_hosts_agree_with_their_ranks(counts: list[int], experts: int) -> None:
    spans = rank_spans(counts[0], hosts_of(counts[1:]))
    world = sum(counts)
    owned = [experts_of(range(rank, rank + 1), world=world, experts=experts) for rank in range(world)]
    assert [expert for each in owned for expert in each] == list(range(experts))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    for span in spans:
        mine = [expert for rank in span.ranks for expert in owned[rank]]
        assert mine == list(experts_of(span.ranks, world=world, experts=experts))


@pytest.mark.parametrize(("text", "host"), [("a.b:9000", "a.b"), ("[::1]:9000", "::1")])
def test_an_address_is_read(text: str, host: str) -> None:
    read = RankHost.parse(text, 8)
    assert read == RankHost(host, 9000, 8)
    assert read.name == text


@pytest.mark.parametrize("text", ["", "a", ":1", "a:0", "a:65536", "a:x", "a:", "a:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        RankHost.parse(text, 1)
