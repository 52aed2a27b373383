from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.runtime.types import Blocks
from glm52_engine.transfer.descriptors import Region, Run, runs
from glm52_engine.transfer.fingerprint import difference
from glm52_engine.transfer.lease import LeaseTable, prompt_digest


@pytest.mark.parametrize(
    ("remote", "local", "merged"),
    [
        pytest.param([], [], [], id="nothing"),
        pytest.param([4, 5, 6], [0, 1, 2], [Run(4, 0, 3)], id="one run"),
        pytest.param([4, 5, 6], [0, 1, 9], [Run(4, 0, 2), Run(6, 9, 1)], id="a gap here"),
        pytest.param([4, 6, 7], [0, 1, 2], [Run(4, 0, 1), Run(6, 1, 2)], id="a gap there"),
        pytest.param([3, 2, 1], [0, 1, 2], [Run(3, 0, 1), Run(2, 1, 1), Run(1, 2, 1)], id="backwards"),
    ],
)
def test_contiguous_blocks_become_one_descriptor(remote: list[int], local: list[int], merged: list[Run]) -> None:
    assert runs(remote, local) == merged


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_runs_pair_the_same_blocks(pairs: list[tuple[int, int]]) -> None:
    merged = runs([theirs for theirs, _ in pairs], [ours for _, ours in pairs])
    assert [(run.remote + i, run.local + i) for run in merged for i in range(run.count)] == pairs


def test_lists_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 remote blocks for 1"):
        runs([1, 2], [1])


def test_blocks_outside_a_pool_are_refused() -> None:
    region = Region(1000, 4, 10)
    assert region.spans([(1, 3)]) == [(1010, 30, 0)]
    for start, count in ((-1, 1), (2, 3)):
        with pytest.raises(ValueError, match="pool of 4"):
            region.spans([(start, count)])


def test_a_fingerprint_names_the_field_and_both_values() -> None:
    assert difference({"dtype": "bf16", "layers": 8}, {"dtype": "bf16", "layers": 8}) == ""
    said = difference({"dtype": "bf16", "layers": 8}, {"dtype": "fp8", "rope": "halves"})
    assert said == (
        "dtype: decode has 'bf16', prefill has 'fp8'; layers: decode has 8, prefill has None; "
        "rope: decode has None, prefill has 'halves'"
    )


def test_a_lease_lives_while_it_is_renewed_and_frees_its_blocks_after() -> None:
    table = LeaseTable(30, 15)
    table.grant("a", Blocks(0, (1, 2)), [5, 6, 7], now=0)
    assert table.expire(29) == []
    renewed = table.renew("a", now=29)
    assert renewed is not None
    assert (renewed.ends_at, renewed.num_tokens) == (44, 3), "who was heard of is missed sooner"
    assert table.expire(43) == []
    assert [lease.request_id for lease in table.expire(44)] == ["a"]
    assert table.renew("a", now=44) is None
    assert table.end("a") is None


def test_a_lease_that_is_over_cannot_be_renewed_even_before_it_is_collected() -> None:
    table = LeaseTable(30)
    table.grant("a", Blocks(0, (1,)), [5], now=0)
    assert table.renew("a", now=30) is None
    assert len(table) == 1


def test_a_digest_tells_prompts_apart() -> None:
    assert prompt_digest([1, 2]) == prompt_digest((1, 2)) != prompt_digest([2, 1])


def test_a_request_that_was_refused_is_known_for_as_long_as_a_lease() -> None:
    table = LeaseTable(30)
    table.refuse("a", now=0)
    assert table.is_refused("a")
    table.expire(29)
    assert table.is_refused("a")
    table.expire(30)
    assert not table.is_refused("a")


def test_a_lease_with_several_readers_ends_with_the_last() -> None:
    table = LeaseTable(30)
    table.grant("a", Blocks(0, (1,)), [1], now=0, readers=2)
    first = table.read("a")
    assert first is not None
    assert first.readers == 1
    assert table.renew("a", now=20) is not None
    last = table.read("a")
    assert last is not None
    assert last.readers == 0
    assert len(table) == 0
    assert table.read("a") is None
    table.grant("b", Blocks(0, (1,)), [1], now=0, readers=2)
    table.read("b")
    assert table.end("b") is not None, "given up by the reader that is left"
    assert table.read("b") is None
