"""What is said of the path from a prefill pod."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.transfer.rates import FORGOTTEN_SECONDS, LEAST_BYTES, SLOW, Rates

GB = 10**9


def pulled(rates: Rates, peer: str, rate: float, *, at: float = 0.0, size: int = GB) -> bool:
    """Whether there is news after a pull at that rate."""
    rates.begin(peer, at)
    return rates.end(peer, size, at + size / rate) is not None


def test_the_first_rate_is_news_and_the_same_again_is_not() -> None:
    rates = Rates()
    assert pulled(rates, "p0", 2 * GB)
    assert not pulled(rates, "p0", 2 * GB)
    assert rates.paths["p0"].rate == pytest.approx(2 * GB)
    assert not rates.paths["p0"].slow


def test_a_small_pull_says_nothing_about_a_rate() -> None:
    rates = Rates()
    assert not pulled(rates, "p0", GB, size=LEAST_BYTES // 4)
    assert rates.paths["p0"].rate == 0
    assert pulled(rates, "p0", GB, size=LEAST_BYTES)


@pytest.mark.parametrize(
    ("others", "rate", "slow"),
    [
        pytest.param([], SLOW * 1.1, False, id="fast enough"),
        pytest.param([], SLOW * 0.9, True, id="too slow for long prompts"),
        pytest.param([20 * GB], 6 * GB, False, id="slower than another"),
        pytest.param([20 * GB], 4 * GB, True, id="far behind another"),
    ],
)
def test_what_is_slow(others: list[float], rate: float, slow: bool) -> None:
    rates = Rates()
    for index, other in enumerate(others):
        pulled(rates, f"other-{index}", other)
    pulled(rates, "p0", rate)
    assert rates.paths["p0"].slow is slow


def test_a_path_that_becomes_slow_is_news_and_so_is_its_recovery() -> None:
    rates = Rates()
    pulled(rates, "p0", 5 * GB)
    assert [pulled(rates, "p0", SLOW / 2) for _ in range(30)].count(True) == 1
    assert rates.paths["p0"].slow
    assert [pulled(rates, "p0", 5 * GB) for _ in range(60)].count(True) == 1
    assert not rates.paths["p0"].slow


def test_a_rate_is_told_with_the_best_of_the_others() -> None:
    rates = Rates()
    pulled(rates, "p0", 5 * GB)
    pulled(rates, "p1", SLOW / 2)
    pulled(rates, "small", GB, size=1000)
    assert rates.card() == [
        {"peer": "p0", "bytes_per_second": 5 * GB, "best": 0, "slow": False},
        {"peer": "p1", "bytes_per_second": SLOW / 2, "best": 5 * GB, "slow": True},
    ]


def test_pulls_that_run_together_share_their_time() -> None:
    rates = Rates()
    rates.begin("p0", 0)
    rates.begin("p0", 0)
    assert rates.end("p0", GB, 1) is None
    assert rates.end("p0", GB, 1) is not None
    assert rates.paths["p0"].rate == pytest.approx(2 * GB)


def test_a_pull_that_failed_changes_no_rate() -> None:
    rates = Rates()
    pulled(rates, "p0", GB)
    rates.begin("p0", 10)
    assert rates.end("p0", 0, 1000) is None
    assert rates.paths["p0"].rate == pytest.approx(GB)


def test_pods_that_are_gone_are_forgotten() -> None:
    rates = Rates()
    pulled(rates, "p0", GB)
    pulled(rates, "p1", GB, at=2 + FORGOTTEN_SECONDS)
    assert set(rates.paths) == {"p1"}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(1e6, 1e11)), min_size=1, max_size=40))
def test_a_rate_lies_between_what_was_measured(pulls: list[tuple[str, float]]) -> None:
    rates = Rates()
    for peer, rate in pulls:
        pulled(rates, peer, rate)
    for name, path in rates.paths.items():
        seen = [rate for peer, rate in pulls if peer == name]
        assert min(seen) * 0.999 <= path.rate <= max(seen) * 1.001
