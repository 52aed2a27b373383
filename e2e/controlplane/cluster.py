"""The cluster as a test sees it: requests that wait for their answer, and one wait on what the watches bring."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from e2e.controlplane.client import MERGE, Client, Object, Query, Refused, path
from e2e.controlplane.plane import ADMIN, ControlPlane

T = TypeVar("T")

WATCHED = (
    "GLM52Deployment",
    "StatefulSet",
    "Deployment",
    "Service",
    "ConfigMap",
    "Role",
    "RoleBinding",
    "ServiceAccount",
    "PodDisruptionBudget",
    "Secret",
    "Pod",
    "Event",
    "Lease",
)

PATIENCE = 60.0
"""Seconds that a wait takes before it fails; generous, since a machine may be busy with something else."""


class Late(AssertionError):
    """What a test waited for did not come; the text holds what was seen last."""


class Loop:
    """An event loop in a thread of its own: watches and stand-ins go on while a test waits or computes."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control-plane-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 120) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(work)

        return self.run(begin())

    def end(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        async def cancel(some: list[asyncio.Task[None]]) -> None:
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)

        self.run(cancel(list(tasks)))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Cluster:
    """Requests of the cluster's administrator, and a store that watches of all namespaces fill.

    `get` and `listed` ask the API server; `seen` and `all_seen` answer from the watches and cost nothing, so that
    `until` can look at them after every event.
    """

    def __init__(self, plane: ControlPlane, loop: Loop) -> None:
        self.plane = plane
        self.loop = loop
        self._changed = threading.Condition()
        self._objects: dict[str, dict[tuple[str, str], Object]] = {kind: {} for kind in WATCHED}
        self._expected: dict[tuple[str, str, str], list[tuple[Callable[[Object], bool], asyncio.Future[float]]]] = {}
        self._version = 0
        self._watches: list[asyncio.Task[None]] = []
        self._client = loop.run(self._connect())

    async def _connect(self) -> Client:
        return Client(self.plane.server, self.plane.ca, self.plane.tokens[ADMIN], "test")

    def watch(self) -> None:
        """Begin to watch; the CRD has to be there."""
        self._watches = [self.loop.spawn(self._follow(kind)) for kind in WATCHED]

    def close(self) -> None:
        self.loop.end(self._watches)
        self.loop.run(self._client.close())

    def install_crd(self, crd: Object) -> None:
        """Returns when objects of the new kind are taken."""
        self.apply(crd)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = self.get(crd["kind"], None, crd["metadata"]["name"]) or {}
            conditions = found.get("status", {}).get("conditions") or []
            if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                return
            time.sleep(0.05)
        raise Late(f"{crd['metadata']['name']} is not established after {PATIENCE:.0f} s")

    def create_namespace(self, name: str) -> None:
        """Returns when pods can be made in it."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        self.until(f"{name} has a service account", lambda: self.seen("ServiceAccount", name, "default"))

    def request(
        self,
        method: str,
        where: str,
        body: Object | None = None,
        query: Query | None = None,
        content_type: str = "application/json",
        user: str = "",
    ) -> Object:
        return self.loop.run(self._client.request(method, where, body, query, content_type=content_type, user=user))

    def apply(self, *objects: Object, manager: str = "test", **query: str) -> Object:
        """Server-side apply of each; returns the last."""
        answer: Object = {}
        for obj in objects:
            answer = self.loop.run(self._client.apply(obj, manager, **query))
        return answer

    def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        try:
            return self.request("GET", path(kind, namespace, name))
        except Refused as error:
            if error.code == 404:
                return None
            raise

    def listed(self, kind: str, namespace: str | None = None, labels: str = "") -> list[Object]:
        found: list[Object] = self.request("GET", path(kind, namespace), None, {"labelSelector": labels})["items"]
        return found

    def patch(
        self, kind: str, namespace: str | None, name: str, change: Object, subresource: str | None = None
    ) -> Object:
        """A merge patch."""
        return self.request("PATCH", path(kind, namespace, name, subresource), change, content_type=MERGE)

    def delete(self, kind: str, namespace: str | None, name: str, cascade: str = "Background") -> None:
        """What is gone already is no error. `cascade`: Background, Foreground or Orphan."""
        try:
            self.request("DELETE", path(kind, namespace, name), {"propagationPolicy": cascade})
        except Refused as error:
            if error.code != 404:
                raise

    def seen(self, kind: str, namespace: str, name: str) -> Object | None:
        with self._changed:
            return self._objects[kind].get((namespace, name))

    def all_seen(self, kind: str, namespace: str) -> list[Object]:
        """By name."""
        with self._changed:
            return [obj for key, obj in sorted(self._objects[kind].items()) if key[0] == namespace]

    def idle(self, seconds: float) -> None:
        """A window in which something shall not happen: there is nothing that could be waited for."""
        time.sleep(seconds)

    def count(self, kind: str, namespace: str) -> int:
        with self._changed:
            return sum(key[0] == namespace for key in self._objects[kind])

    def expect(self, kind: str, namespace: str, name: str, probe: Callable[[Object], bool]) -> asyncio.Future[float]:
        """Within the loop: when the watch brings the object in that state, as time on the monotonic clock."""
        seen: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._expected.setdefault((kind, namespace, name), []).append((probe, seen))
        return seen

    def until(
        self,
        what: str,
        probe: Callable[[], T | None],
        timeout: float = PATIENCE,
        last: Callable[[], object] | None = None,
        pause: float = 0.0,
    ) -> T:
        """The first true result of `probe`, which is asked again after each event; `Late` at the deadline.

        `last` tells in the error what was there instead; `pause` is for probes that are too costly for every event.
        """
        deadline = time.monotonic() + timeout
        while True:
            # Not asked under the lock: a probe may wait for an answer that the loop's thread brings.
            version = self._version
            found = probe()
            if found:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise Late(f"not within {timeout:.0f} s: {what}; seen last: {last() if last else found!r}")
            if pause:
                time.sleep(pause)
            with self._changed:
                self._changed.wait_for(lambda seen=version: self._version != seen, left)  # type: ignore[misc]

    async def _follow(self, kind: str) -> None:
        async for event, obj in self._client.watch(kind):
            with self._changed:
                self._take(kind, event, obj)
                self._version += 1
                self._changed.notify_all()

    def _take(self, kind: str, event: str, obj: Object) -> None:
        store = self._objects[kind]
        if event == "LISTED":
            store.clear()
            store.update({_key(item): {"kind": kind, **item} for item in obj["items"]})
        elif event == "DELETED":
            store.pop(_key(obj), None)
        else:
            store[_key(obj)] = obj
            for probe, seen in self._expected.get((kind, *_key(obj)), ()):
                if not seen.done() and probe(obj):
                    seen.set_result(time.monotonic())


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
