"""Ranks of a host load side by side, and the reason of one that fails is told at once; what a sequence begins with."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from glm52_engine.config import ConfigError
from glm52_engine.ranks.books import running_of, start_of
from glm52_engine.ranks.captures import Captures
from glm52_engine.ranks.collectives import CollectiveError
from glm52_engine.ranks.load import Together
from glm52_engine.runtime.rank import Running
from glm52_engine.runtime.types import Sampling, Token

SECONDS = 30.0


def test_what_fails_ends_the_others_at_their_next_progress() -> None:
    """A pool that cannot be pinned must not wait for minutes of weights."""
    together, started = Together(), threading.Event()
    read: list[int] = []
    progress = together.progress(lambda done, total: read.append(done))

    def reads() -> None:
        for part in range(1000):
            progress(part, 1000)
            started.set()
            threading.Event().wait(0.01)

    def fails() -> None:
        assert started.wait(SECONDS)
        raise ConfigError("host_pool_gib: 4 GiB cannot be pinned")

    with pytest.raises(ConfigError, match="cannot be pinned"):
        together.each([reads, fails])
    assert 0 < len(read) < 1000


def test_a_failure_within_a_part_is_the_reason_of_the_whole() -> None:
    together = Together()

    def fails() -> int:
        raise ConfigError("no room on the second GPU")

    def reads() -> int:
        progress = together.progress(lambda done, total: None)
        while True:
            progress(0, 1)
            threading.Event().wait(0.01)

    with pytest.raises(ConfigError, match="second GPU"):
        together.each([lambda: together.each([reads, reads]), lambda: together.each([lambda: 1, fails])])


def test_results_are_in_the_order_of_the_ranks() -> None:
    first = threading.Event()

    def late() -> str:
        assert first.wait(SECONDS)
        return "rank 0"

    def early() -> str:
        first.set()
        return "rank 1"

    assert Together().each([late, early]) == ["rank 0", "rank 1"]


def test_ranks_of_a_process_capture_one_by_one_and_go_on_together() -> None:
    captures, order = Captures(2), threading.Lock()
    seen: list[str] = []

    def captured(rank: int) -> None:
        with captures.turn():
            for what in ("begins", "ends"):
                with order:
                    seen.append(f"{rank} {what}")
                threading.Event().wait(0.05)
        with order:
            seen.append(f"{rank} goes on")

    Together().each([lambda: captured(0), lambda: captured(1)])
    first, other = seen[0][0], seen[2][0]
    assert seen[:4] == [f"{first} begins", f"{first} ends", f"{other} begins", f"{other} ends"]
    assert sorted(seen[4:]) == ["0 goes on", "1 goes on"]


def test_a_rank_whose_neighbour_captures_nothing_is_woken() -> None:
    captures, entered = Captures(2), threading.Event()

    def waits() -> None:
        with captures.turn():
            entered.set()

    def gives_up() -> None:
        assert entered.wait(SECONDS)
        captures.abandon()

    with pytest.raises(CollectiveError, match="another rank of this host"):
        Together().each([waits, gives_up])


def test_a_rank_is_told_all_that_a_sequence_begins_with() -> None:
    """Also what came from a store and has to go to the GPU, and what has to come back from there at the end."""
    sequence = Running(
        "k", 3, (5, 6), (1, 2, 3), Sampling(4, temperature=0.5), 7, True, priority=2, choices=3, computed=2,
        last=Token(9, 1), arrived=2, kept=True,
    )  # fmt: skip
    assert running_of(start_of(sequence)) == sequence
    assert running_of(start_of(replace(sequence, last=None, arrived=0))) == replace(sequence, last=None, arrived=0)
