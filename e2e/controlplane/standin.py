"""A stand-in for scheduler and kubelets: moves pods through their lives as a test says.

Every pod is bound to a node at once, runs, is ready, and ends when it is deleted; `Life` says how fast, and whether at
all. What befalls a running pod (a crash, an OOM kill, a probe that fails) a test does to it by name.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import json
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from e2e.controlplane.client import MERGE, Client, Object, Refused, path
from e2e.controlplane.cluster import Loop
from e2e.controlplane.plane import KUBELETS, ControlPlane

NODES = ("node-0", "node-1", "node-2")
_GiB = 1 << 20
"""In Ki, the unit that a kubelet reports memory in."""

FOREVER = float("inf")


@dataclass(frozen=True)
class Exit:
    """How a container ends."""

    code: int = 0
    message: str = ""
    """The termination message."""
    reason: str = ""
    """Empty: Completed or Error, by the code."""


@dataclass(frozen=True)
class Life:
    """Seconds of each part of a pod's life; FOREVER where the next part never comes."""

    start: float = 0.0
    """From bound to running."""
    warm_up: float = 0.0
    """From running to ready."""
    drain: float = 0.0
    """From deletion to the end; what is longer than the grace period ends as a kill (137) when that is over.
    FOREVER: the pod hangs in Terminating, as on a node that is lost, until `release`."""
    end: Exit = Exit()
    bound: bool = True
    """False: no node takes it."""
    address: str = ""
    """Of one that a test answers for; empty: one where nobody answers."""


@dataclass
class _Pod:
    """What is known of one pod while it lives."""

    obj: Object
    life: Life
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Kubelets:
    def __init__(self, plane: ControlPlane, loop: Loop) -> None:
        self._plane = plane
        self._loop = loop
        self._rules: list[tuple[Callable[[Object], bool], Life]] = []
        self._missing_images: set[str] = set()
        self._image_news = asyncio.Event()
        self._pods: dict[str, _Pod] = {}
        self._addresses = (f"10.244.{high}.{low}" for high, low in itertools.product(range(256), range(1, 255)))
        self._client = loop.run(self._begin())
        self._watch = loop.spawn(self._follow())

    def close(self) -> None:
        lives = [pod.task for pod in self._pods.values() if pod.task is not None]
        self._loop.end([self._watch, *lives])
        self._loop.run(self._client.close())

    # What a test says before.

    def live(self, life: Life, namespace: str, role: str | None = None, *, matching: str = "") -> None:
        """How pods that come from now on live: all of a namespace, or of one role, or whose name holds a text.

        What was said last counts.
        """

        def of(pod: Object) -> bool:
            meta = pod["metadata"]
            return bool(
                meta["namespace"] == namespace
                and role in (None, meta.get("labels", {}).get("glm52.dev/role"))
                and matching in meta["name"]
            )

        self._rules.insert(0, (of, life))

    def lacks_image(self, image: str) -> None:
        """Pods with this image stay in ImagePullBackOff."""
        self._missing_images.add(image)

    def has_image(self, image: str) -> None:
        """It can be pulled again; pods that waited for it go on."""
        self._missing_images.discard(image)

        async def tell() -> None:
            self._image_news.set()
            self._image_news = asyncio.Event()

        self._loop.run(tell())

    # What a test does to a running pod. All return when the API server knows.

    def crash(self, namespace: str, pod: str, end: Exit, *, restarts: bool = True) -> None:
        """The container ends; `restarts`: it is ready again at once, otherwise it waits in CrashLoopBackOff."""
        self._loop.run(self._crash(namespace, pod, end, restarts=restarts))

    def oom_kill(self, namespace: str, pod: str, *, restarts: bool = True) -> None:
        self.crash(namespace, pod, Exit(137, reason="OOMKilled"), restarts=restarts)

    def ready(self, namespace: str, pod: str, ready: bool) -> None:
        """The readiness probe's verdict changes."""
        self._loop.run(self._set_ready(namespace, pod, ready))

    def restart(self, namespace: str, pod: str) -> None:
        """A container that waits in CrashLoopBackOff runs and is ready again."""
        self._loop.run(self._set_ready(namespace, pod, True))

    def release(self, namespace: str, pod: str) -> None:
        """A pod that hangs in Terminating, or drains, ends now."""

        async def tell() -> None:
            for known in self._pods.values():
                meta = known.obj["metadata"]
                if (meta["namespace"], meta["name"]) == (namespace, pod):
                    known.released.set()

        self._loop.run(tell())

    async def _begin(self) -> Client:
        client = Client(self._plane.server, self._plane.ca, self._plane.tokens[KUBELETS], "kubelets")
        for name in NODES:
            await client.request("POST", path("Node"), {"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}})
            room = {"cpu": "256", "memory": f"{2048 * _GiB}Ki", "pods": "5000", "ephemeral-storage": "1000Gi"}
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", **_times()}
            status = {"capacity": room, "allocatable": room, "conditions": [ready]}
            await client.request("PATCH", path("Node", None, name, "status"), {"status": status}, content_type=MERGE)
        return client

    async def _follow(self) -> None:
        async for event, obj in self._client.watch("Pod"):
            if event == "LISTED":
                here = {item["metadata"]["uid"] for item in obj["items"]}
                for item in obj["items"]:
                    self._take(item)
                for uid in set(self._pods) - here:
                    self._forget(uid)
            elif event == "DELETED":
                self._forget(obj["metadata"]["uid"])
            else:
                self._take(obj)

    def _take(self, obj: Object) -> None:
        uid = obj["metadata"]["uid"]
        pod = self._pods.get(uid)
        if pod is None:
            life = next((life for matches, life in self._rules if matches(obj)), Life())
            pod = self._pods[uid] = _Pod(obj, life)
            pod.task = asyncio.create_task(self._guarded(pod), name=obj["metadata"]["name"])
        pod.obj = obj
        if obj["metadata"].get("deletionTimestamp"):
            pod.leaves.set()

    def _forget(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod is not None and pod.task is not None:
            pod.task.cancel()

    async def _guarded(self, pod: _Pod) -> None:
        """A pod's life goes on through an API server that is away; what is refused is about an older pod."""
        meta = pod.obj["metadata"]
        for step in (self._run, self._end):
            while True:
                try:
                    await step(pod)
                    break
                except Refused as error:
                    if error.code in (404, 409, 422):
                        pod.obj = await self._get(meta["namespace"], meta["name"]) or pod.obj
                    await asyncio.sleep(0.1)
                except (aiohttp.ClientError, TimeoutError, OSError):
                    await asyncio.sleep(0.1)

    async def _run(self, pod: _Pod) -> None:
        """Until it is deleted."""
        if pod.leaves.is_set():
            return
        if not pod.life.bound:
            await self._status(pod, {"conditions": [_condition("PodScheduled", False, "Unschedulable")]})
            await pod.leaves.wait()
            return
        if not pod.obj["spec"].get("nodeName"):
            await self._bind(pod)
        while (missing := self._missing(pod.obj)) is not None:
            news = self._image_news
            await self._status(pod, waiting(pod.obj, "ImagePullBackOff", f'Back-off pulling image "{missing}"'))
            await _first(pod.leaves.wait(), news.wait())
            if pod.leaves.is_set():
                return
        if _is_running(pod.obj):
            await pod.leaves.wait()
            return
        if await _leaves_within(pod, pod.life.start):
            return
        if pod.life.warm_up:
            await self._status(pod, self._started(pod, ready=False))
            if await _leaves_within(pod, pod.life.warm_up):
                return
        await self._status(pod, self._started(pod, ready=True))
        await pod.leaves.wait()

    async def _end(self, pod: _Pod) -> None:
        """From deletion to gone."""
        meta = pod.obj["metadata"]
        ends = pod.life.end
        grace = float(meta.get("deletionGracePeriodSeconds") or 0)
        if _is_running(pod.obj):
            # A pod that leaves is not ready: the endpoint slices have to lose it.
            await self._status(pod, {"conditions": _conditions(ready=False)})
            drain = pod.life.drain
            if drain == FOREVER:
                await pod.released.wait()
            else:
                await _first(pod.released.wait(), asyncio.sleep(min(drain, grace)))
                if drain > grace and not pod.released.is_set():
                    ends = Exit(137)
            await self._counted_as_leaving(meta["namespace"], meta["name"])
            await self._status(pod, _ended(pod.obj, ends))
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        await self._client.request("DELETE", path("Pod", meta["namespace"], meta["name"]), body)
        await asyncio.Event().wait()

    async def _counted_as_leaving(self, namespace: str, name: str) -> None:
        """Until no budget still waits to see an evicted pod leave.

        A kubelet is never faster than that. Of a pod that was, only the one made again under its name is seen, and
        the budget takes that for the leaving one and lets nothing go, for two minutes.
        """
        while True:
            budgets = (await self._client.request("GET", path("PodDisruptionBudget", namespace)))["items"]
            if not any(name in (budget.get("status", {}).get("disruptedPods") or {}) for budget in budgets):
                return
            await asyncio.sleep(0.05)

    async def _bind(self, pod: _Pod) -> None:
        meta = pod.obj["metadata"]
        # By name, so that a pod comes back to its node, and replicas lie apart.
        node = NODES[sum(meta["name"].encode()) % len(NODES)]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": meta["name"]}, "target": target}
        await self._client.request("POST", path("Pod", meta["namespace"], meta["name"], "binding"), binding)

    def _missing(self, obj: Object) -> str | None:
        images = (c["image"] for c in obj["spec"]["containers"])
        return next((image for image in images if image in self._missing_images), None)

    def _started(self, pod: _Pod, *, ready: bool) -> Object:
        address = pod.obj.get("status", {}).get("podIP") or pod.life.address or next(self._addresses)
        return {**running(pod.obj, ready=ready), "podIP": address, "podIPs": [{"ip": address}], "hostIP": "192.168.0.1"}

    async def _crash(self, namespace: str, name: str, end: Exit, *, restarts: bool) -> None:
        obj = await self._must(namespace, name)
        terminated = _terminated(obj, end)
        statuses = [
            {
                **status,
                "ready": restarts,
                "restartCount": status["restartCount"] + restarts,
                "lastState": {"terminated": terminated},
                "state": _running() if restarts else {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
            }
            for status in obj["status"]["containerStatuses"]
        ]
        await self._patch(obj, {"containerStatuses": statuses, "conditions": _conditions(ready=restarts)})

    async def _set_ready(self, namespace: str, name: str, ready: bool) -> None:
        obj = await self._must(namespace, name)
        statuses = [
            {**s, "ready": ready, "state": s["state"] if "running" in s["state"] else _running()}
            for s in obj["status"]["containerStatuses"]
        ]
        await self._patch(obj, {"containerStatuses": statuses, "conditions": _conditions(ready=ready)})

    async def _must(self, namespace: str, name: str) -> Object:
        found = await self._get(namespace, name)
        assert found is not None, f"there is no pod {namespace}/{name}"
        assert found["status"].get("containerStatuses"), f"pod {namespace}/{name} does not run yet"
        return found

    async def _get(self, namespace: str, name: str) -> Object | None:
        try:
            return await self._client.request("GET", path("Pod", namespace, name))
        except Refused as error:
            if error.code == 404:
                return None
            raise

    async def _status(self, pod: _Pod, status: Object) -> None:
        await self._patch(pod.obj, status)

    async def _patch(self, obj: Object, status: Object) -> None:
        meta = obj["metadata"]
        body = {"metadata": {"uid": meta["uid"]}, "status": status}
        await self._client.request(
            "PATCH", path("Pod", meta["namespace"], meta["name"], "status"), body, content_type=MERGE
        )


def running(obj: Object, *, ready: bool) -> Object:
    """The status of a pod whose containers run."""
    return {
        "phase": "Running",
        "startTime": _now(),
        "conditions": _conditions(ready=ready),
        "containerStatuses": [_container(c, _running(), ready=ready) for c in obj["spec"]["containers"]],
    }


def waiting(obj: Object, reason: str, message: str) -> Object:
    """The status of a pod whose containers have not begun."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {
        "phase": "Pending",
        "conditions": _conditions(ready=False),
        "containerStatuses": [_container(c, state, ready=False) for c in obj["spec"]["containers"]],
    }


def termination(**fields: Any) -> str:
    """A termination message as the engine writes it."""
    return json.dumps(fields)


def _container(spec: Object, state: Object, *, ready: bool) -> Object:
    return {
        "name": spec["name"],
        "image": spec["image"],
        "imageID": "",
        "restartCount": 0,
        "ready": ready,
        "started": "running" in state,
        "state": state,
    }


def _running() -> Object:
    return {"running": {"startedAt": _now()}}


def _terminated(obj: Object, end: Exit) -> Object:
    started = obj["status"]["containerStatuses"][0]["state"].get("running", {}).get("startedAt")
    return {
        "exitCode": end.code,
        "reason": end.reason or ("Completed" if end.code == 0 else "Error"),
        "message": end.message,
        "startedAt": started or _now(),
        "finishedAt": _now(),
        # Two ends within one second are told apart by it.
        "containerID": f"containerd://{uuid.uuid4().hex}",
    }


def _ended(obj: Object, end: Exit) -> Object:
    """The last status of a pod that was deleted."""
    statuses = [
        {**_container(c, {"terminated": _terminated(obj, end)}, ready=False), "started": False}
        for c in obj["spec"]["containers"]
    ]
    return {
        "phase": "Succeeded" if end.code == 0 else "Failed",
        "containerStatuses": statuses,
        "conditions": _conditions(ready=False),
    }


def _conditions(*, ready: bool) -> list[Object]:
    up = [_condition(kind, True) for kind in ("PodScheduled", "Initialized")]
    return up + [_condition(kind, ready) for kind in ("ContainersReady", "Ready")]


def _condition(kind: str, value: bool, reason: str = "") -> Object:
    more = {"reason": reason, "message": f"0/{len(NODES)} nodes are available."} if reason else {}
    return {"type": kind, "status": "True" if value else "False", "lastTransitionTime": _now(), **more}


def _is_running(obj: Object) -> bool:
    statuses = obj.get("status", {}).get("containerStatuses") or []
    return any("running" in status["state"] for status in statuses)


def _times() -> Object:
    return {"lastHeartbeatTime": _now(), "lastTransitionTime": _now()}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _first(*waits: Awaitable[Any]) -> None:
    """Until one of them is over."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _leaves_within(pod: _Pod, seconds: float) -> bool:
    """Whether the pod is deleted within that time."""
    if seconds == FOREVER:
        await pod.leaves.wait()
    elif seconds:
        await _first(pod.leaves.wait(), asyncio.sleep(seconds))
    return pod.leaves.is_set()
