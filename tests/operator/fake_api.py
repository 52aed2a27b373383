"""An API server in a dict: enough of create, apply, get, list and delete for the reconciler's unit tests.

Applying here replaces what was applied before and keeps status; the true rules of server-side apply are tested against
a true API server.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

from glm52_operator.desired.target import Object
from glm52_operator.reconcile.client import ApiError
from glm52_operator.reconcile.kinds import Kind


class FakeApi:
    def __init__(self) -> None:
        self.objects: dict[tuple[Kind, str, str], Object] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.refuse: Callable[[str, Kind, str], tuple[int, str] | None] = lambda verb, kind, name: None
        self.events: list[Object] = []
        self.refuse_list: Callable[[Kind], tuple[int, str] | None] = lambda kind: None
        self._versions = itertools.count(100)

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        """Of everything but events: see `told`."""
        return [call for call in self.calls if call[0] not in ("get", "list") and call[1] != "Event"]

    @property
    def told(self) -> list[Object]:
        """Events that were written, in the order of their first write."""
        return [obj for (kind, _, _), obj in self.objects.items() if kind.kind == "Event"]

    def put(self, kind: Kind, obj: Object) -> Object:
        meta = obj["metadata"]
        meta["resourceVersion"] = str(next(self._versions))
        meta.setdefault("uid", f"uid-{kind.kind}-{meta['name']}")
        self.objects[kind, meta["namespace"], meta["name"]] = obj
        return copy.deepcopy(obj)

    def find(self, kind: str, name: str) -> Object:
        return next(o for (k, _, n), o in self.objects.items() if (k.kind, n) == (kind, name))

    def _call(self, verb: str, kind: Kind, name: str) -> None:
        self.calls.append((verb, kind.kind, name))
        refused = self.refuse_list(kind) if verb == "list" else self.refuse(verb, kind, name)
        if refused is not None:
            raise ApiError(code=refused[0], text=refused[1], verb=verb, kind=kind, name=name)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self._call("get", kind, name)
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    get_metadata = get

    async def list(
        self, kind: Kind, namespace: str | None, *, keep: Callable[[Object], Object] = lambda obj: obj, **_: Any
    ) -> Any:
        self._call("list", kind, "")
        if kind.kind == "Event":
            return copy.deepcopy(self.events), "1"
        found = [o for (k, ns, _), o in self.objects.items() if k is kind and namespace in (None, ns)]
        return [keep(copy.deepcopy(obj)) for obj in found], str(next(self._versions))

    async def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        name = body["metadata"]["name"]
        self._call("create", kind, name)
        if (kind, namespace, name) in self.objects:
            raise ApiError(code=409, text="already exists", verb="create", kind=kind, name=name)
        return self.put(kind, copy.deepcopy(body))

    async def apply(
        self, kind: Kind, body: Object, *, subresource: str | None = None, dry_run: bool = False, new: bool = False
    ) -> Object:
        meta = body["metadata"]
        self._call("patch", kind, meta["name"] + (f"/{subresource}" if subresource else ""))
        key = (kind, meta["namespace"], meta["name"])
        old = self.objects.get(key)
        if new and old is not None:
            raise ApiError(code=409, text="the object has been modified", verb="patch", kind=kind, name=meta["name"])
        if subresource:
            assert old is not None
            assert old["metadata"]["uid"] == meta["uid"]
            return self.put(kind, {**copy.deepcopy(old), "status": copy.deepcopy(body["status"])})
        made = copy.deepcopy(body)
        made["metadata"]["generation"] = 1
        if old is not None:
            changed = old.get("spec") != made.get("spec")
            made["metadata"] |= {"uid": old["metadata"]["uid"], "generation": old["metadata"]["generation"] + changed}
            made |= {"status": old["status"]} if "status" in old else {}
        return self.put(kind, made)

    async def annotate(self, kind: Kind, namespace: str, name: str, *, uid: str, annotations: dict[str, str]) -> Object:
        self._call("patch", kind, name)
        obj = self.objects[kind, namespace, name]
        assert obj["metadata"]["uid"] == uid
        obj["metadata"]["annotations"] = {**obj["metadata"].get("annotations", {}), **annotations}
        return self.put(kind, obj)

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, version: str | None = None, grace: int | None = None
    ) -> None:
        self._remove("delete", kind, namespace, name, uid, version)

    async def evict(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        self._remove("create", kind, namespace, name, uid, None, subresource="/eviction")

    def _remove(
        self, verb: str, kind: Kind, namespace: str, name: str, uid: str, version: str | None, subresource: str = ""
    ) -> None:
        self._call(verb, kind, name + subresource)
        meta = self.objects[kind, namespace, name]["metadata"]
        if meta["uid"] != uid or version not in (None, meta["resourceVersion"]):
            raise ApiError(code=409, text="the object has been modified", verb=verb, kind=kind, name=name)
        if kind.kind == "Pod":
            # Gone when its containers are.
            meta["deletionTimestamp"] = "2026-01-02T00:00:00Z"
            self.put(kind, self.objects[kind, namespace, name])
        else:
            del self.objects[kind, namespace, name]
