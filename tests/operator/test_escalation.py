"""Crashes counted: examples, and a machine that crashes, restarts operators and edits specifications at random."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from glm52_operator.plan.escalation import Crash, CrashPolicy, Series, basis, escalate
from glm52_operator.status.crashes import read_series, write_series
from tests.operator.ends import NOW, at

POLICY = CrashPolicy(backoff_base=30, backoff_max=600, max_restarts=4, reset=datetime.timedelta(seconds=3600))
ONE = "chat-decode-0"


def crash(seconds: float, pod: str = ONE) -> Crash:
    return Crash(f"{pod}@{seconds}", pod, at(seconds))


def run(
    crashes: list[Crash], previous: list[Series] | None = None, *, now: float = 0, spec: str = "s", replica: str = ONE
) -> Series | None:
    seen = [(replica, each) for each in crashes]
    found = escalate(previous or [], seen, POLICY, basis=spec, replicas={replica}, now=at(now))
    return found[0] if found else None


def test_each_start_waits_longer_up_to_a_limit_but_the_first() -> None:
    assert [POLICY.delay(n) for n in range(1, 9)] == [0, 30, 60, 120, 240, 480, 600, 600]


def test_back_off_counts_from_the_last_crash() -> None:
    first = run([crash(-100)])
    assert first is not None
    assert first.held_until(POLICY) is None
    second = run([crash(-100), crash(-10)])
    assert second is not None
    assert second.held_until(POLICY) == at(20)


def test_too_many_within_the_time_are_latched_and_older_ones_do_not_count() -> None:
    spread = run([crash(-4000), crash(-300), crash(-200), crash(-100)])
    assert spread is not None
    assert not spread.latched
    close = run([crash(-400), crash(-300), crash(-200), crash(-100)])
    assert close is not None
    assert close.latched
    assert close.held_until(POLICY) is None


def test_the_latch_outlives_its_crashes_and_falls_with_an_edit() -> None:
    seen = [crash(-400), crash(-300), crash(-200), crash(-100)]
    latched = run(seen)
    assert latched is not None
    later = run([], [latched], now=90_000)
    assert later is not None
    assert later.latched
    edited = run(seen, [latched], now=1, spec="new")
    assert edited is not None
    assert not edited.latched
    # Its pod still shows the old crashes: they are off the account.
    assert edited.incidents == []
    again = run([*seen, crash(2)], [edited], now=3, spec="new")
    assert again is not None
    assert len(again.incidents) == 1


def test_an_edit_forgives_also_what_nobody_had_looked_at() -> None:
    once = run([crash(-100)])
    assert once is not None
    # The operator was away, or the kubelet late: with the edit it sees another one.
    edited = run([crash(-100), crash(-1)], [once], spec="new")
    assert edited is not None
    assert edited.incidents == []
    again = run([crash(-1), crash(2)], [edited], now=3, spec="new")
    assert again is not None
    assert again.incidents == [at(2)]


def test_a_longer_reset_time_does_not_bring_back_what_an_edit_forgives() -> None:
    short = CrashPolicy(30, 600, max_restarts=1, reset=datetime.timedelta(seconds=600))
    long = CrashPolicy(30, 600, max_restarts=1, reset=datetime.timedelta(seconds=3600))
    seen = [(ONE, crash(-700)), (ONE, crash(-100))]
    (latched,) = escalate([], seen, short, basis="s", replicas={ONE}, now=at(0))
    (released,) = escalate([latched], seen, long, basis="new", replicas={ONE}, now=at(1))
    assert (released.incidents, released.latched) == ([], False)


def test_hosts_of_one_replica_that_fall_together_are_one_crash() -> None:
    together = [crash(-100 + n, f"chat-decode-{n}") for n in range(4)]
    found = run(together)
    assert found is not None
    assert found.incidents == [at(-97)]
    # A host that crashes twice has crashed twice, however soon.
    found = run([*together, crash(-95, "chat-decode-0")])
    assert found is not None
    assert len(found.incidents) == 2


def test_a_replica_that_is_not_wanted_any_more_is_forgotten() -> None:
    latched = run([crash(-400), crash(-300), crash(-200), crash(-100)])
    assert latched is not None
    assert escalate([latched], [], POLICY, basis="s", replicas=set(), now=NOW) == []


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        pytest.param({"decode": {"replicas": 9, "maxNumSeqs": 4}}, True, id="scaled by an autoscaler"),
        pytest.param({"decode": {"replicas": 2, "maxNumSeqs": 5}}, False, id="another size"),
        pytest.param({"restart": "now"}, False, id="restarted by a person"),
    ],
)
def test_only_what_a_person_edits_forgives(edit: dict[str, object], same: bool) -> None:
    spec = {"model": {"preset": "tiny"}, "decode": {"replicas": 2, "maxNumSeqs": 4}}
    assert (basis(spec) == basis({**spec, **edit})) is same


@given(st.integers(1, 200), st.floats(0, 1000), st.floats(0, 10_000))
def test_back_off_never_shrinks_and_never_passes_its_maximum(crashes: int, base: float, most: float) -> None:
    policy = CrashPolicy(base, most, 8, datetime.timedelta(hours=1))
    assert policy.delay(crashes) <= policy.delay(crashes + 1) <= most


class Deployment(RuleBasedStateMachine):
    """Two replicas; a pod shows its last two crashes, as the kubelet does, until it is replaced."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.spec = 0
        self.shown: dict[str, list[Crash]] = {"a": [], "b": []}
        self.counted: dict[str, list[float]] = {"a": [], "b": []}
        self.status: list[dict[str, object]] = []
        self.latched_at: dict[str, int] = {}
        self.look()

    @rule(replica=st.sampled_from("ab"), skew=st.integers(-3, 30))
    def crashes(self, replica: str, skew: int) -> None:
        self.now += 1
        made = Crash(f"{replica}{self.now}", replica, at(self.now + skew))
        self.shown[replica] = [*self.shown[replica][-1:], made]
        self.counted[replica].append(min(self.now + skew, self.now))
        self.look()

    @rule(replica=st.sampled_from("ab"))
    def refuses_its_configuration(self, replica: str) -> None:
        """Is no crash: nothing of it reaches the planner, and the pod shows one crash less."""
        self.now += 1
        self.shown[replica] = self.shown[replica][-1:]
        self.look()

    @rule(seconds=st.sampled_from([1, 60, 1800, 3000]))
    def time_goes_by(self, seconds: int) -> None:
        self.now += seconds
        self.look()

    @rule(replica=st.sampled_from("ab"))
    def pod_is_replaced(self, replica: str) -> None:
        self.shown[replica] = []
        self.look()

    @rule()
    def edited(self) -> None:
        self.spec += 1
        self.counted = {"a": [], "b": []}
        self.latched_at = {}
        self.look()

    @rule(replica=st.sampled_from("ab"))
    def crashes_before_an_edit_and_both_are_seen_at_once(self, replica: str) -> None:
        if any(entry["replica"] == replica for entry in self.status):
            self.now += 1
            made = Crash(f"{replica}{self.now}", replica, at(self.now))
            self.shown[replica] = [*self.shown[replica][-1:], made]
            self.edited()

    @rule()
    def looked_at_again(self) -> None:
        self.look()

    def look(self) -> None:
        """A pass; every one begins from the status alone, as that of a new operator process does."""
        seen = [(replica, each) for replica, shown in self.shown.items() for each in shown]
        found = escalate(
            read_series(self.status), seen, POLICY, basis=str(self.spec), replicas={"a", "b"}, now=at(self.now)
        )
        self.status = write_series(found, POLICY)
        for series in found:
            if series.latched:
                self.latched_at.setdefault(series.replica, self.spec)

    @invariant()
    def each_crash_counts_once(self) -> None:
        by_replica = {series.replica: series for series in read_series(self.status)}
        for replica, times in self.counted.items():
            within = [t for t in times if t > self.now - POLICY.reset.total_seconds()]
            series = by_replica.get(replica)
            assert len(series.incidents if series else []) == len(within)

    @invariant()
    def latched_only_by_crashes_and_released_only_by_an_edit(self) -> None:
        latched = {series.replica for series in read_series(self.status) if series.latched}
        assert latched == set(self.latched_at)
        for replica in latched:
            assert len(self.counted[replica]) >= POLICY.max_restarts

    @invariant()
    def nothing_is_held_longer_than_the_policy_says(self) -> None:
        for series in read_series(self.status):
            until = series.held_until(POLICY)
            assert until is None or until <= at(self.now + POLICY.backoff_max)


TestDeployment = Deployment.TestCase
