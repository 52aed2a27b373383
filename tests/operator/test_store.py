"""What the operator knows of the cluster."""

from __future__ import annotations

from typing import Any

from glm52_operator import names
from glm52_operator.reconcile.kinds import BY_KIND, DEPLOYMENT_RESOURCE, POD
from glm52_operator.reconcile.queue import WorkQueue
from glm52_operator.reconcile.store import Store, owner_key
from glm52_operator.reconcile.watch import handle
from tests.operator.builders import listed, resource
from tests.operator.conftest import FakeClock

SERVICE = BY_KIND["Service"]
LABELS = {names.MANAGED_BY: names.MANAGER, names.NAME: "chat"}
KEY = ("ns", "chat")


def service(version: int = 1, uid: str = "u", name: str = "s", labels: Any = None, namespace: str = "ns") -> Any:
    meta = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**meta, "labels": LABELS if labels is None else labels}}


def test_the_newest_version_counts_whatever_arrives_last() -> None:
    store = Store()
    assert store.observe(SERVICE, service(5))
    assert not store.observe(SERVICE, service(4))
    assert not store.observe(SERVICE, service(5))
    assert store.get(SERVICE, "ns", "s") == service(5)


def test_a_late_delete_does_not_take_the_object_that_came_after() -> None:
    store = Store()
    store.observe(SERVICE, service(9, uid="new"))
    store.remove(SERVICE, service(8, uid="old"))
    assert store.get(SERVICE, "ns", "s") is not None
    store.remove(SERVICE, service(10, uid="new"))
    assert store.get(SERVICE, "ns", "s") is None
    assert list(store.owned(SERVICE, KEY)) == []


def test_the_last_state_of_a_pod_is_kept_in_whatever_order_its_news_come() -> None:
    store = Store()

    def seen(version: int, uid: str, node: str = "worker") -> Any:
        return {**service(version, uid=uid, name="p"), "spec": {"nodeName": node}}

    store.observe(POD, seen(5, "old"))
    store.observe(POD, seen(9, "new"))
    store.remove(POD, seen(8, "old"))
    assert store.get(POD, "ns", "p") == seen(9, "new")
    (first,) = store.departed(KEY)
    assert first == seen(8, "old")
    # What comes while this is written down is not forgotten with it.
    store.remove(POD, seen(10, "old"))
    store.forget_departed(KEY, [first])
    assert store.departed(KEY) == [seen(10, "old")]
    # One that never had a node, and what is no pod, leaves nothing to tell.
    store.remove(POD, seen(12, "new", node=""))
    store.remove(SERVICE, service(1))
    listed(store, POD, None, [], "99")
    assert len(store.departed(KEY)) == 1


def test_a_list_takes_away_what_it_lacks_and_tells_whom_it_concerns() -> None:
    store = Store()
    store.observe(SERVICE, service(5, name="gone"))
    store.observe(SERVICE, service(5, name="same"))
    store.observe(SERVICE, service(50, name="newer than the list"))
    store.observe(SERVICE, service(5, name="elsewhere", namespace="other"))
    assert listed(store, SERVICE, "ns", [service(5, name="same")], "20") == {KEY}
    assert {o["metadata"]["name"] for o in store.owned(SERVICE, KEY)} == {"same", "newer than the list"}
    assert store.get(SERVICE, "other", "elsewhere") is not None
    assert (
        listed(store, SERVICE, "ns", [service(5, name="same"), service(50, name="newer than the list")], "60") == set()
    )


def test_what_is_deleted_while_a_list_comes_does_not_return_by_one_of_its_pages() -> None:
    """All pages are of one moment, and no event would take it away again."""
    store = Store()
    store.observe(SERVICE, service(5, uid="old"))
    with store.listing(SERVICE, None) as listing:
        store.remove(SERVICE, service(21, uid="old"))
        listing.take(service(5, uid="old"))
        assert store.get(SERVICE, "ns", "s") is None
        store.observe(SERVICE, service(22, uid="new"))
        listing.end("20")
    assert store.get(SERVICE, "ns", "s") == service(22, uid="new")


def test_a_list_that_breaks_off_takes_nothing_away() -> None:
    store = Store()
    store.observe(SERVICE, service(5, name="later page"))
    with store.listing(SERVICE, None) as listing:
        listing.take(service(7, name="first page"))
    assert [obj["metadata"]["name"] for obj in store.owned(SERVICE, KEY)] == ["first page", "later page"]
    assert listed(store, SERVICE, None, [], "20") == {KEY}
    assert list(store.owned(SERVICE, KEY)) == []


def test_children_are_found_by_label() -> None:
    assert owner_key(SERVICE, service()) == KEY
    assert owner_key(SERVICE, service(labels={names.NAME: "chat"})) is None
    assert owner_key(DEPLOYMENT_RESOURCE, resource()) == KEY


async def test_events_reach_the_queue_once_per_news(clock: FakeClock) -> None:
    store, queue = Store(), WorkQueue[Any](clock)
    handle(SERVICE, None, service(5), store, queue)
    assert await queue.get() == KEY
    queue.done(KEY)
    handle(SERVICE, "MODIFIED", service(5), store, queue)
    assert queue.waiting() == []
    handle(SERVICE, "DELETED", service(5), store, queue)
    assert queue.waiting() == [KEY]
    assert store.get(SERVICE, "ns", "s") is None


def test_a_child_that_lost_its_labels_still_wakes_its_deployment(clock: FakeClock) -> None:
    store, queue = Store(), WorkQueue[Any](clock)
    store.observe(SERVICE, service(5))
    handle(SERVICE, "MODIFIED", service(6, labels={}), store, queue)
    assert queue.waiting() == [KEY]


async def test_only_a_new_specification_skips_the_delay_of_a_failure(clock: FakeClock) -> None:
    store, queue = Store(), WorkQueue[Any](clock)

    def update(version: int, generation: int) -> list[Any]:
        obj = resource(generation=generation)
        obj["metadata"]["resourceVersion"] = str(version)
        handle(DEPLOYMENT_RESOURCE, "MODIFIED", obj, store, queue)
        return queue.waiting()

    assert update(1, 1) == [KEY]
    await queue.get()
    queue.failed(KEY)
    assert update(2, 1) == []
    assert update(3, 2) == [KEY]
