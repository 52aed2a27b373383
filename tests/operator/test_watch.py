"""A watch that began anew with a list is noticed: kopf only logs it."""

from __future__ import annotations

from glm52_operator.reconcile.kinds import POD, SECRET, Kind
from glm52_operator.reconcile.watch import FIRST_LIST_SECONDS, Relists
from tests.operator.builders import pod
from tests.operator.conftest import FakeClock


def relists(clock: FakeClock, *, scoped: bool = False) -> tuple[Relists, list[Kind]]:
    found: list[Kind] = []
    return Relists(clock, found.append, scoped=scoped), found


def test_the_first_list_is_none_that_began_anew(clock: FakeClock) -> None:
    own, found = relists(clock)
    for number in range(3):
        own.listed(POD, pod(f"p-{number}"))
        clock.advance(FIRST_LIST_SECONDS / 4)
    assert found == []


def test_items_of_a_later_list_tell(clock: FakeClock) -> None:
    own, found = relists(clock)
    own.listed(POD, pod("p-0"))
    own.listed(SECRET, pod("s-0"))
    clock.advance(FIRST_LIST_SECONDS + 1)
    own.changed(POD, pod("p-1"))
    assert found == []
    own.listed(POD, pod("p-2"))
    assert found == [POD]


def test_a_watch_that_had_nothing_to_list_at_first(clock: FakeClock) -> None:
    own, found = relists(clock)
    own.changed(POD, pod("p-0"))
    clock.advance(FIRST_LIST_SECONDS + 1)
    own.listed(POD, pod("p-1"))
    assert found == [POD]


def test_each_namespace_of_a_scoped_operator_has_its_own_first_list(clock: FakeClock) -> None:
    own, found = relists(clock, scoped=True)
    other = pod("p-0")
    other["metadata"]["namespace"] = "other"
    own.listed(POD, pod("p-0"))
    clock.advance(FIRST_LIST_SECONDS + 1)
    own.listed(POD, other)
    assert found == []


def test_a_list_of_thousands_is_one_list_however_long_it_takes(clock: FakeClock) -> None:
    own, found = relists(clock)
    for number in range(50):
        own.listed(POD, pod(f"p-{number}"))
        clock.advance(FIRST_LIST_SECONDS / 4)
    assert found == []
    # The next one tells at its first item, and once.
    for number in range(50):
        own.listed(POD, pod(f"p-{number}"))
        clock.advance(FIRST_LIST_SECONDS / 4)
    assert found == [POD]
