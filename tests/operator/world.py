"""One deployment, its reconciler and an API server in a dict."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from glm52_operator import names
from glm52_operator.reconcile.apply import Applier
from glm52_operator.reconcile.events import Recorder
from glm52_operator.reconcile.kinds import BY_KIND, DEPLOYMENT_RESOURCE, POD, WATCHED
from glm52_operator.reconcile.reconciler import ACTING, Reconciler, Result
from glm52_operator.reconcile.store import Store
from tests.operator.builders import IMAGE, listed, pod, resource
from tests.operator.conftest import FakeClock
from tests.operator.fake_api import FakeApi

KEY = ("ns", "chat")
NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


@dataclass
class World:
    api: FakeApi
    clock: FakeClock
    reconciler: Reconciler

    @property
    def store(self) -> Store:
        return self.reconciler.store

    def start(self) -> None:
        """A new operator process."""
        store = Store()
        applier = Applier(self.api, store, self.clock)  # type: ignore[arg-type]
        recorder = Recorder(self.api, lambda: NOW, "test")  # type: ignore[arg-type]
        self.reconciler = Reconciler(self.api, store, applier, recorder, IMAGE, lambda: NOW)  # type: ignore[arg-type]

    async def list_all(self) -> None:
        for kind in WATCHED:
            listed(self.store, kind, None, *await self.api.list(kind, None))
        self.api.calls.clear()

    async def run(self, attempt: int = 0) -> Result:
        await self.list_all()
        result = await self.reconciler.reconcile(KEY, attempt)
        if result.again:
            result = await self.reconciler.reconcile(KEY, attempt)
        if result.requeue_after is not None and result.requeue_after <= ACTING:
            self.clock.advance(result.requeue_after)
            calls = [*self.api.calls]
            await self.list_all()
            self.api.calls[:] = calls
            result = await self.reconciler.reconcile(KEY, attempt)
        return result

    def edit(self, **spec: Any) -> None:
        obj = self.api.find(names.KIND, "chat")
        obj["spec"] |= spec
        obj["metadata"]["generation"] += 1
        self.api.put(DEPLOYMENT_RESOURCE, obj)

    def serve(self) -> None:
        """The controllers and the kubelet do their work: every pod runs and is ready."""
        for name in ("chat-prefill", "chat-decode", "chat-router"):
            kind = "Deployment" if name == "chat-router" else "StatefulSet"
            obj = self.api.find(kind, name)
            wanted = obj["spec"]["replicas"]
            obj["status"] = {
                "observedGeneration": obj["metadata"]["generation"],
                **dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas"), wanted),
                "currentRevision": "r1",
                "updateRevision": "r1",
            }
            self.api.put(BY_KIND[kind], obj)
            for number in range(wanted):
                self.api.put(POD, pod(f"{name}-{number}", role=name.removeprefix("chat-"), ready=True))

    def condition(self, kind: str) -> dict[str, Any]:
        status = self.api.find(names.KIND, "chat")["status"]
        return next(c for c in status["conditions"] if c["type"] == kind)


def new_world(clock: FakeClock) -> World:
    made = World(FakeApi(), clock, None)  # type: ignore[arg-type]
    made.start()
    made.api.put(DEPLOYMENT_RESOURCE, resource())
    return made
