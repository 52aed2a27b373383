"""One pass over one deployment: observe, decide, apply, report."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from glm52_engine.config import Role
from glm52_operator import names
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.capacity import demands
from glm52_operator.plan.drains import Heard, Phase, askable
from glm52_operator.plan.failures import Failure
from glm52_operator.plan.paths import ends as path_ends
from glm52_operator.plan.resolve import Invalid
from glm52_operator.plan.restarts import actions
from glm52_operator.plan.rollout import plan_for
from glm52_operator.reconcile.apply import Applied, Applier, failure_of
from glm52_operator.reconcile.client import Api, ApiError
from glm52_operator.reconcile.clock import LoopClock
from glm52_operator.reconcile.events import Recorder
from glm52_operator.reconcile.kinds import BY_KIND, DEPLOYMENT_RESOURCE, EVENT, POD
from glm52_operator.reconcile.listen import Listener
from glm52_operator.reconcile.nodes import Nodes
from glm52_operator.reconcile.paths import Follow
from glm52_operator.reconcile.restarts import Restarter
from glm52_operator.reconcile.rollout import Rolled, Roller
from glm52_operator.reconcile.store import Key, Store
from glm52_operator.reconcile.wanted import Resolver, Wanted
from glm52_operator.status.compute import Observed, compute, is_settled
from glm52_operator.status.conditions import Verdict
from glm52_operator.status.ends import Ends, Pods, replicas
from glm52_operator.status.ends import observe as observe_ends
from glm52_operator.status.notices import repaired, transition
from glm52_operator.status.schedulable import UNOBSERVED, schedulable

log = logging.getLogger("glm52.reconcile")

SOON = 10.0
"""Seconds until a deployment that is not ready is looked at again: events of its StatefulSets are not watched."""

SETTLING = 2.0
"""Seconds that a controller has to make the pods that it lacks before its events are read for why it does not."""

ACTING = 0.5
"""Seconds that controllers have to act on a change before the status tells of it: at once it would say that nobody has
seen the change yet, and be out of date with the next event."""

QUIET_ATTEMPTS = 3
"""Conflicts and short outages are retried that often before the status tells of them."""


@dataclass(frozen=True, slots=True)
class Result:
    failed: bool = False
    again: bool = False
    """There is more to do, after what others wait for."""
    requeue_after: float | None = None


@dataclass(slots=True)
class Reconciler:
    api: Api
    store: Store
    applier: Applier
    recorder: Recorder
    default_image: str | None
    utcnow: Callable[[], datetime.datetime]
    _told: dict[Key, str] = field(default_factory=dict)
    """The last failure logged per deployment, so that a retry does not repeat it line by line."""
    tally: Callable[[Object, Object], None] = lambda before, after: None
    """Told of every status that was written, with the one before."""
    listener: Listener = field(default_factory=lambda: Listener(LoopClock(), _nobody))
    follow_paths: Follow = lambda key, readers, peers: None
    roller: Roller = field(init=False)
    restarter: Restarter = field(init=False)
    _resolver: Resolver = field(init=False)
    _nodes: Nodes = field(init=False)
    _lacking: dict[tuple[Key, names.Component], float] = field(default_factory=dict)
    """Since when a workload has fewer pods than are wanted."""
    _acting: dict[Key, float] = field(default_factory=dict)
    """When a workload was written that no status has told of."""

    def __post_init__(self) -> None:
        self.roller = Roller(self.api, self.store, self.utcnow)
        self.restarter = Restarter(self.api, self.store)
        self._resolver = Resolver(self.default_image)
        self._nodes = Nodes(self.api, self.applier.clock)

    async def reconcile(self, key: Key, attempt: int) -> Result:
        """Bring one deployment where its specification wants it; `attempt` counts the failures in a row before this."""
        resource = self.store.get(DEPLOYMENT_RESOURCE, *key)
        if resource is None or resource["metadata"].get("deletionTimestamp"):
            # Children carry owner references: the garbage collector removes them, also while no operator runs.
            if resource is not None:
                self.applier.forget(resource["metadata"]["uid"])
                self.recorder.forget(resource["metadata"]["uid"])
                self._resolver.forget(resource["metadata"]["uid"])
            self._told.pop(key, None)
            self._acting.pop(key, None)
            for component in names.ROLES:
                self._lacking.pop((key, component), None)
            self.listener.follow(key, {})
            self.follow_paths(key, {}, ())
            self.store.forget_departed(key, self.store.departed(key))
            return Result()
        found = self._resolver.resolve(resource)
        resolved = found.target if isinstance(found, Wanted) else found
        applied = Applied([])
        if isinstance(found, Wanted):
            if attempt == 0 and self.applier.is_new(found.target):
                begun = await self.applier.begin(found)
                if not begun.failures:
                    return Result(again=True)
            applied = await self.applier.apply(found, complete=is_complete(resource))
            await self.recorder.record(resource, map(repaired, applied.repaired))
        failures = applied.failures
        held: dict[Role, str] = {}
        pods = self._pods(key)
        if isinstance(resolved, Target):
            rolled = await self._roll_out(key, resource, resolved, pods)
            failures += rolled.failures
            held = rolled.held
            pods = self._pods(key) if rolled.notices else pods
        departed = self.store.departed(key)
        ends: Ends | None = None
        if isinstance(resolved, Target):
            ends = observe_ends(resource, resolved, pods, departed, self.listener.heard(key), self.utcnow())
            self.listener.follow(key, askable(pod for members in pods.values() for pod in members))
            self.follow_paths(key, *path_ends(resolved, pods))
            chosen = actions(ends.restarts, replicas(resolved, pods), ends.policy, self.utcnow())
            failures += await self.restarter.act(key, chosen)
            pods = self._pods(key) if chosen else pods
        self._tell(key, failures)
        if failures and all(failure.transient for failure in failures) and attempt < QUIET_ATTEMPTS:
            return Result(failed=True)
        observed = await self._observe(key, found, pods, failures, held)
        status = compute(resource, resolved, observed, ends, now=self.utcnow())
        acting = self._acting_for(key, status, set_off=applied.sets_off)
        if acting is not None and not failures:
            return Result(requeue_after=acting)
        self._acting.pop(key, None)
        written = await self._write_status(key, resource, status)
        if written and ends is not None:
            self.store.forget_departed(key, departed)
        latest = self.store.get(DEPLOYMENT_RESOURCE, *key)
        if latest is not None and latest["metadata"].get("generation") != resource["metadata"].get("generation"):
            # An edit came meanwhile. Where the answer to our own write brought it, its event is no news any more, and
            # nothing else would ever tell of it.
            return Result(again=True)
        if failures or not written:
            return Result(failed=True)
        return Result(requeue_after=None if isinstance(resolved, Invalid) else self._next_look(key, status, ends))

    async def _roll_out(self, key: Key, resource: Object, target: Target, pods: Pods) -> Rolled:
        """The next step of a rollout, if there is one to take now."""
        workloads: dict[names.Component, Object | None] = {role: self._workload(key, role) for role in names.ROLES}
        rolled = await self.roller.step(key, plan_for(target, workloads, pods).replacements)
        await self.recorder.record(resource, rolled.notices)
        return rolled

    def _pods(self, key: Key) -> dict[names.Component, list[Object]]:
        pods: dict[names.Component, list[Object]] = {component: [] for component in (*names.ROLES, names.ROUTER)}
        for pod in self.store.owned(POD, key):
            role = pod["metadata"]["labels"].get(names.ROLE)
            if role in pods:
                pods[role].append(pod)
        return pods

    async def _observe(
        self, key: Key, wanted: Wanted | Invalid, pods: Pods, failures: list[Failure], held: Mapping[Role, str]
    ) -> Observed:
        workloads = {component: self._workload(key, component) for component in (*names.ROLES, names.ROUTER)}
        events: dict[names.Component, list[str]] = {}
        room = UNOBSERVED
        if isinstance(wanted, Wanted):
            room = await self._schedulable(wanted, pods)
            for component in names.ROLES:
                workload = workloads[component]
                if workload is not None and self._is_refused_pods(key, component, workload):
                    events[component] = await self._create_failures(key, workload)
        return Observed(workloads=workloads, pods=pods, failures=failures, events=events, schedulable=room, held=held)

    def _acting_for(self, key: Key, status: Object, *, set_off: bool) -> float | None:
        """Seconds that a change is still given to show, in which the status would be out of date at once."""
        now = self.applier.clock.now()
        if set_off:
            self._acting.setdefault(key, now)
        left = self._acting[key] + ACTING - now if key in self._acting else 0.0
        return left if left > 0 and not is_settled(status) else None

    def _is_refused_pods(self, key: Key, component: names.Component, workload: Object) -> bool:
        """Whether its controller has had the time to make what it lacks: it says what it has before it is done."""
        if not _lacks_pods(workload):
            self._lacking.pop((key, component), None)
            return False
        now = self.applier.clock.now()
        return now - self._lacking.setdefault((key, component), now) >= SETTLING

    def _next_look(self, key: Key, status: Object, ends: Ends | None) -> float | None:
        """Seconds until something may have changed without an event; None where nothing can."""
        lacking = [self._lacking[key, role] for role in names.ROLES if (key, role) in self._lacking]
        if any(self.applier.clock.now() - since < SETTLING for since in lacking):
            return SETTLING
        return None if _rests(status, ends) and not lacking else SOON

    async def _schedulable(self, wanted: Wanted, pods: Pods) -> Verdict:
        """The nodes are asked for only while a pod has none: at rest nothing is listed."""
        demanded = demands(wanted.target, pods, wanted.needs)
        missing = any(demand.missing for demand in demanded)
        return schedulable(demanded, await self._nodes.look() if missing else None)

    def _workload(self, key: Key, component: names.Component) -> Object | None:
        kind = BY_KIND["Deployment" if component == "router" else "StatefulSet"]
        return self.store.get(kind, key[0], names.role(key[1], component))

    async def _create_failures(self, key: Key, workload: Object) -> list[str]:
        """Why a StatefulSet makes no pods (quota, admission): only its events say so."""
        fields = f"involvedObject.uid={workload['metadata']['uid']},reason=FailedCreate"
        try:
            found, _ = await self.api.list(EVENT, key[0], fields=fields)
        except ApiError as error:
            log.warning("%s/%s: %s", *key, failure_of(error).message)
            return []
        found.sort(key=lambda event: str(event.get("lastTimestamp") or event["metadata"].get("creationTimestamp")))
        return [str(event.get("message", "")) for event in found]

    async def _write_status(self, key: Key, resource: Object, status: Object) -> bool:
        if status == resource.get("status"):
            return True
        meta = resource["metadata"]
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            # The uid makes sure that a new object of the same name does not get the state of the old one.
            "metadata": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
            "status": status,
        }
        try:
            answer = await self.api.apply(DEPLOYMENT_RESOURCE, body, subresource="status")
        except ApiError as error:
            gone = error.code in (404, 409)
            log.log(logging.INFO if gone else logging.WARNING, "%s/%s: %s", *key, failure_of(error).message)
            return False
        self.store.observe(DEPLOYMENT_RESOURCE, answer)
        _log_ready(key, resource, status)
        before = resource.get("status", {})
        self.tally(before, status)
        await self.recorder.record(resource, transition(before, status))
        return True

    def _tell(self, key: Key, failures: list[Failure]) -> None:
        text = "; ".join(failure.message for failure in failures)
        if text and text != self._told.get(key):
            log.warning("%s/%s: %s", *key, text)
        elif not text and key in self._told:
            log.info("%s/%s: everything was applied", *key)
        if text:
            self._told[key] = text
        else:
            self._told.pop(key, None)


def _rests(status: Object, ends: Ends | None) -> bool:
    """Whether only an event can change something: of a pod that is gone no event may come any more."""
    return is_settled(status) and not (
        ends is not None and any(drain.phase is not Phase.ENDED for drain in ends.drains)
    )


async def _nobody(address: str) -> Heard | None:
    """Asked where no pods can be reached."""
    return None


def _lacks_pods(workload: Object) -> bool:
    """Whether its controller has seen what is wanted and made fewer pods: it was refused some."""
    status = workload.get("status", {})
    current = status.get("observedGeneration") == workload["metadata"].get("generation")
    return bool(current and status.get("replicas", 0) < workload["spec"]["replicas"])


def is_complete(resource: Object) -> bool:
    """Whether every child was there for the specification as it is."""
    status = resource.get("status", {})
    current = status.get("observedGeneration") == resource["metadata"].get("generation")
    return bool(current and is_settled(status))


def _log_ready(key: Key, resource: Object, status: Object) -> None:
    def ready(of: Object) -> tuple[str, str] | None:
        found = (c for c in of.get("conditions", []) if c["type"] == "Ready")
        return next(((c["status"], c["reason"]) for c in found), None)

    if ready(status) != ready(resource.get("status", {})):
        message = next(c["message"] for c in status["conditions"] if c["type"] == "Ready")
        log.info("%s/%s: Ready=%s %s: %s", *key, *(ready(status) or ("", "")), message)
