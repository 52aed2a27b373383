"""What the operator knows of the cluster: filled by lists, kept fresh by watches and by the answers to its own writes.

A watch can be silent for long, and a delete can fall between a broken watch and the next list; so every list replaces
what it covers, and an answer to a write counts at once, before the watch brings the same object. A list is taken in
object by object: thousands of them, unpacked and at once, are more than all that is kept.
"""

from __future__ import annotations

import contextlib
import marshal
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from glm52_operator import names
from glm52_operator.desired.target import Object
from glm52_operator.reconcile.kinds import DEPLOYMENT_RESOURCE, POD, Kind

Key = tuple[str, str]
"""Namespace and name of a GLM52Deployment."""


def owner_key(kind: Kind, obj: Object) -> Key | None:
    """The deployment that an object belongs to; None for one that is not ours."""
    meta = obj["metadata"]
    if kind is DEPLOYMENT_RESOURCE:
        return meta["namespace"], meta["name"]
    labels = meta.get("labels") or {}
    if labels.get(names.MANAGED_BY) != names.MANAGER or names.NAME not in labels:
        return None
    return meta["namespace"], labels[names.NAME]


DEPARTED = 64
"""Pods of one deployment that are remembered after they are gone; of more at once the first are told as unknown."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """An object as it is kept: packed, a tenth of what it takes unpacked, and unpacked in microseconds."""

    version: int | None
    uid: str | None
    owner: Key | None
    packed: bytes

    def unpack(self) -> Object:
        obj: Object = marshal.loads(self.packed)
        return obj


class Store:
    def __init__(self) -> None:
        self._objects: dict[Kind, dict[Key, _Kept]] = {}
        self._by_owner: dict[tuple[Kind, Key], set[Key]] = {}
        self._departed: dict[Key, deque[Object]] = {}
        self._listings: dict[Kind, list[Listing]] = {}

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, which is the caller's own."""
        known = self._objects.get(kind, {}).get((namespace, name))
        return known.unpack() if known is not None else None

    def version(self, kind: Kind, namespace: str, name: str) -> int | None:
        """Its resource version; None where it is not known, or no number."""
        known = self._objects.get(kind, {}).get((namespace, name))
        return known.version if known is not None else None

    def owned_names(self, kind: Kind, owner: Key) -> list[str]:
        """Names of the objects that `owned` gives."""
        return sorted(name for _, name in self._by_owner.get((kind, owner), ()))

    def owned(self, kind: Kind, owner: Key) -> Iterator[Object]:
        """Objects of a kind that carry the labels of a deployment."""
        objects = self._objects.get(kind, {})
        for key in sorted(self._by_owner.get((kind, owner), ())):
            yield objects[key].unpack()

    def deployments(self) -> list[Key]:
        return sorted(self._objects.get(DEPLOYMENT_RESOURCE, {}))

    def observe(self, kind: Kind, obj: Object) -> bool:
        """Take an object in, unless something newer is known; returns whether it was news."""
        key = _key(obj)
        known = self._objects.get(kind, {}).get(key)
        if known is not None and not _newer(obj, known):
            return False
        self._put(kind, key, obj)
        return True

    def expect_leaving(self, kind: Kind, namespace: str, name: str, uid: str, deadline: str) -> None:
        """We told an object to go, and the answer did not show it: it leaves, until a newer version of it says more."""
        known = self.get(kind, namespace, name)
        if known is not None and known["metadata"].get("uid") == uid:
            meta = {"deletionTimestamp": deadline, **known["metadata"]}
            self._put(kind, (namespace, name), {**known, "metadata": meta})

    def remove(self, kind: Kind, obj: Object) -> None:
        """An object was deleted. A new one that took its name since stays."""
        key = _key(obj)
        known = self._objects.get(kind, {}).get(key)
        if known is not None and known.uid == obj["metadata"].get("uid"):
            self._drop(kind, key)
        for listing in self._listings.get(kind, ()):
            listing.gone(obj)
        # Also where its successor was seen before: events of different objects come in any order.
        self._depart(kind, obj)

    @contextlib.contextmanager
    def listing(self, kind: Kind, namespace: str | None) -> Iterator[Listing]:
        """For as long as a list comes; `namespace` None: it covers all."""
        begun = Listing(self, kind, namespace)
        self._listings.setdefault(kind, []).append(begun)
        try:
            yield begun
        finally:
            self._listings[kind].remove(begun)

    def retain(self, kind: Kind, namespace: str | None, listed: Collection[Key], version: str) -> set[Key]:
        """What a list lacks is gone, unless newer than the list. Returns the deployments concerned."""
        concerned: set[Key] = set()
        for key, known in list(self._objects.get(kind, {}).items()):
            in_scope = namespace is None or key[0] == namespace
            if in_scope and key not in listed and not _after(known, version):
                concerned |= {known.owner} if known.owner else set()
                self._drop(kind, key)
                self._depart(kind, known.unpack())
        return concerned

    def departed(self, owner: Key) -> list[Object]:
        """Last states of a deployment's pods that are gone, until they are forgotten: how they ended stands there."""
        return list(self._departed.get(owner, ()))

    def forget_departed(self, owner: Key, pods: Iterable[Object]) -> None:
        """What these had to say has been written down."""
        written = list(pods)
        # Not by uid: a later state of the same pod may have come meanwhile, and say more.
        left = [pod for pod in self._departed.pop(owner, ()) if not any(pod is each for each in written)]
        if left:
            self._departed[owner] = deque(left, DEPARTED)

    def _depart(self, kind: Kind, obj: Object) -> None:
        owner = owner_key(kind, obj)
        if kind is POD and owner is not None and obj.get("spec", {}).get("nodeName"):
            self._departed.setdefault(owner, deque(maxlen=DEPARTED)).append(obj)

    def _put(self, kind: Kind, key: Key, obj: Object) -> None:
        self._drop(kind, key)
        owner = owner_key(kind, obj)
        packed = marshal.dumps(slim(obj))
        kept = _Kept(version_of(obj), obj["metadata"].get("uid"), owner, packed)
        self._objects.setdefault(kind, {})[key] = kept
        if owner is not None:
            self._by_owner.setdefault((kind, owner), set()).add(key)

    def _drop(self, kind: Kind, key: Key) -> None:
        known = self._objects.get(kind, {}).pop(key, None)
        if known is not None and known.owner is not None:
            members = self._by_owner[kind, known.owner]
            members.discard(key)
            if not members:
                del self._by_owner[kind, known.owner]


class Listing:
    """One list on its way into the store: what it shows counts at once, what it lacks only when all of it has come."""

    def __init__(self, store: Store, kind: Kind, namespace: str | None) -> None:
        self._store, self._kind, self._namespace = store, kind, namespace
        self._listed: set[Key] = set()
        self._gone: set[str | None] = set()
        self._concerned: set[Key] = set()

    def gone(self, obj: Object) -> None:
        """Deleted since the list began. Its pages are all as old as the first: by a later one it would come back, and
        no event would ever take it away again."""
        self._gone.add(obj["metadata"].get("uid"))

    def take(self, obj: Object) -> Key:
        """One object of the list."""
        key, owner = _key(obj), owner_key(self._kind, obj)
        if obj["metadata"].get("uid") not in self._gone:
            self._listed.add(key)
            if self._store.observe(self._kind, obj) and owner is not None:
                self._concerned.add(owner)
        return key

    def end(self, version: str) -> set[Key]:
        """All of it has come, as of this resource version. Returns the deployments concerned."""
        return self._concerned | self._store.retain(self._kind, self._namespace, self._listed, version)


def slim(obj: Object) -> Object:
    """All of an object but the record of who set which field, which is half of it and read by nobody."""
    return {**obj, "metadata": {name: value for name, value in obj["metadata"].items() if name != "managedFields"}}


def _key(obj: Object) -> Key:
    meta = obj["metadata"]
    return meta["namespace"], meta["name"]


def version_of(obj: Object) -> int | None:
    """An object's resource version; None where it is no number."""
    text = str(obj["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else None


def _newer(obj: Object, known: _Kept) -> bool:
    """Resource versions of one resource grow; where they are no numbers, the later arrival counts."""
    new = version_of(obj)
    return new is None or known.version is None or new > known.version


def _after(known: _Kept, version: str) -> bool:
    return known.version is not None and version.isdigit() and known.version > int(version)
