"""The glue to kopf: its watches feed the store and the queue, and that is all kopf does here.

Only `on.event` is used. The other handlers of kopf keep their state in annotations and finalizers of the user's object,
retry on their own terms, and hold up deletion while no operator runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kopf

from glm52_operator.reconcile.client import MANAGED_SELECTOR, PAGE
from glm52_operator.reconcile.clock import Clock
from glm52_operator.reconcile.health import Health
from glm52_operator.reconcile.kinds import DEPLOYMENT_RESOURCE, WATCHED, Kind
from glm52_operator.reconcile.queue import WorkQueue
from glm52_operator.reconcile.store import Key, Store, owner_key

FIRST_LIST_SECONDS = 10.0
"""How long no item of a list may come before the next one is another list's; the operator's own list is as old."""


class _NoState(kopf.DiffBaseStorage, kopf.ProgressStorage):
    """kopf keeps nothing on objects, since `on.event` needs nothing; its default copies every object four times."""

    def build(self, **_: Any) -> Any:
        return {}

    def clear(self, *, essence: Any) -> Any:
        return essence

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None


def settings() -> kopf.OperatorSettings:
    own = kopf.OperatorSettings()
    own.persistence.diffbase_storage = own.persistence.progress_storage = _NoState()
    own.peering.standalone = True
    own.posting.enabled = False
    # No watch of namespaces and CRDs: the operator may be confined to one namespace, and it needs neither.
    own.scanning.disabled = True
    # A stop waits that long for kopf to empty its queues; ours is emptied by itself.
    own.queueing.exit_timeout = 0.5
    # A task and a queue for each object that changed lately, with what it was; making them anew costs less than keeping
    # thousands, as many as a list brings in that time.
    own.queueing.idle_timeout = 0.05
    own.networking.request_timeout = 30
    # The server ends each watch, and it goes on from there. One that does not end in time was cut silently: this is how
    # long it can go unnoticed. Bookmarks come once a minute, which is too seldom to tell.
    own.watching.server_timeout = 40
    own.watching.client_timeout = 45
    own.watching.connect_timeout = 5
    own.watching.chunk_size = PAGE
    for kind in WATCHED:
        if kind is not DEPLOYMENT_RESOURCE:
            own.watching.label_selectors[_selector(kind)] = MANAGED_SELECTOR
    return own


def _selector(kind: Kind) -> tuple[str, str, str]:
    return kind.group, kind.version, kind.plural


@dataclass(slots=True)
class Relists:
    """Notices that a watch began anew with a list, which kopf only logs: items of a list come again.

    A list does not show what was deleted while the watch was away, so `restarted` is called for another one that does.
    """

    clock: Clock
    restarted: Callable[[Kind], None]
    scoped: bool = False
    """Whether every namespace has its own watch."""
    _last: dict[tuple[Kind, str], float] = field(default_factory=dict)
    """When each watch brought its first object, or the last one of a list."""
    _listed: dict[tuple[Kind, str], set[tuple[str, str]]] = field(default_factory=dict)
    """What the list that each watch goes through has shown. Thousands of objects take longer than any limit, and taken
    for lists that begin anew they would be listed again and again."""

    def listed(self, kind: Kind, obj: Any) -> None:
        """An object came as part of a list."""
        stream, now = self._stream(kind, obj), self.clock.now()
        shown = self._listed.setdefault(stream, set())
        name = obj["metadata"]["namespace"], obj["metadata"]["name"]
        if name in shown or now - self._last.get(stream, now) > FIRST_LIST_SECONDS:
            shown.clear()
            self.restarted(kind)
        shown.add(name)
        self._last[stream] = now

    def changed(self, kind: Kind, obj: Any) -> None:
        """An object came by itself: from now on the watch has something to lose."""
        self._last.setdefault(self._stream(kind, obj), self.clock.now())

    def _stream(self, kind: Kind, obj: Any) -> tuple[Kind, str]:
        return kind, obj["metadata"]["namespace"] if self.scoped else ""


def registry(store: Store, queue: WorkQueue[Key], health: Health, relists: Relists) -> kopf.OperatorRegistry:
    own = kopf.OperatorRegistry()
    for kind in WATCHED:
        _watch(own, kind, store, queue, health, relists)
    kopf.on.login(registry=own, id="in-cluster")(kopf.login_with_service_account)
    kopf.on.login(registry=own, id="kubeconfig")(kopf.login_with_kubeconfig)
    return own


def _watch(
    own: kopf.OperatorRegistry, kind: Kind, store: Store, queue: WorkQueue[Key], health: Health, relists: Relists
) -> None:
    async def on_event(event: Any, **_: Any) -> None:
        health.heard(kind, event["object"])
        if event.get("type") is None:
            relists.listed(kind, event["object"])
        else:
            relists.changed(kind, event["object"])
        handle(kind, event.get("type"), event["object"], store, queue)

    kopf.on.event(kind.group, kind.version, kind.plural, registry=own, id=f"watch-{kind.plural}")(on_event)


def handle(kind: Kind, event: str | None, obj: Any, store: Store, queue: WorkQueue[Key]) -> None:
    """Take one watch event in. Items of the initial list come without a type."""
    obj = {"apiVersion": kind.api_version, "kind": kind.kind, **obj}
    key = owner_key(kind, obj)
    known = store.get(kind, obj["metadata"]["namespace"], obj["metadata"]["name"])
    if event == "DELETED":
        store.remove(kind, obj)
    elif not store.observe(kind, obj):
        return
    if key is None:
        # Somebody took our labels off: the deployment that lost the object has to know.
        key = owner_key(kind, known) if known is not None else None
    if key is not None:
        edited = kind is DEPLOYMENT_RESOURCE and _edited(known, obj)
        # A child that is gone at last may be what the last pass waited for.
        queue.add(key, fresh=edited or event == "DELETED")


def _edited(known: Any, obj: Any) -> bool:
    """A new specification may cure what failed: it is tried at once."""
    if known is None:
        return True
    fields = ("uid", "generation", "deletionTimestamp")
    return any(known["metadata"].get(field) != obj["metadata"].get(field) for field in fields)
