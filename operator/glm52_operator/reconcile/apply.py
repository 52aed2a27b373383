"""Makes the children of one deployment what they should be, and reports what the API server refused."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from glm52_operator import names
from glm52_operator.desired.secret import build_internal_secret
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.changes import applied_hash, difference, repair, stamp, startable, unstamped
from glm52_operator.plan.failures import Failure, classify, leaving, not_ours
from glm52_operator.plan.ownership import Ownership, ownership
from glm52_operator.plan.pods import is_pending
from glm52_operator.plan.pruning import is_used
from glm52_operator.reconcile.client import Api, ApiError
from glm52_operator.reconcile.clock import Clock
from glm52_operator.reconcile.kinds import BY_KIND, CHILDREN, POD, SECRET, Kind
from glm52_operator.reconcile.store import Store, version_of
from glm52_operator.reconcile.wanted import Wanted

log = logging.getLogger("glm52.apply")

TOKEN_BYTES = 32
SECRET_RECHECK_SECONDS = 30.0
WAITING_SECONDS = 10.0
"""How long a pod may have no container that runs before its Secret is asked for."""
AT_ONCE = 3
"""Children of one deployment under way: each takes a connection, and there are several workers. Connections are not
limited themselves: a webhook that hangs would then keep the lease from being renewed."""
_WORKLOADS = {"StatefulSet", "Deployment"}


def failure_of(error: ApiError) -> Failure:
    return classify(
        code=error.code,
        text=error.text,
        verb=error.verb,
        resource=error.resource,
        kind=error.kind.kind,
        name=error.name,
    )


@dataclass(slots=True)
class Applied:
    failures: list[Failure]
    """What the API server refused."""
    repaired: list[str] = field(default_factory=list)
    """What others had done to children."""
    sets_off: bool = False
    """Whether a controller has something to do now: a workload was written."""


@dataclass(slots=True)
class Applier:
    api: Api
    store: Store
    clock: Clock
    _secret_seen: dict[str, float] = field(default_factory=dict)
    """uid of a deployment → when its Secret was last seen; a watch of Secrets would need the right to read them all."""
    _waiting: dict[str, float] = field(default_factory=dict)
    """uid of a deployment → since when there is a pod that does not run."""
    _alike: dict[str, dict[tuple[str, str], tuple[int | None, str | None]]] = field(default_factory=dict)
    """uid of a deployment → child → its resource version and the hash of what is wanted, which were found to agree.

    Most children never change, and comparing them all was half of what a pass took.
    """

    async def begin(self, wanted: Wanted) -> Applied:
        """Apply what engine pods are made of, and nothing else: they take minutes where the rest takes seconds."""
        return await self._apply_all(wanted.target, [wanted.engines], complete=False)

    async def apply(self, wanted: Wanted, *, complete: bool) -> Applied:
        """Apply what differs. Workloads wait until everything that their pods mount is there.

        `complete`: all children were there for this specification, so a missing one was taken away.
        """
        target = wanted.target
        applied = await self._apply_all(target, self._in_order(wanted), complete=complete)
        applied.failures += await self._prune(target, [*wanted.engines, *wanted.others])
        return applied

    def _in_order(self, wanted: Wanted) -> Iterator[Sequence[Object]]:
        """What a scale waits for comes first, and the rest is not even built before it is written.

        A binding is refused before its role is there, a Deployment's pods before their service account.
        """
        yield wanted.engines
        last = ("RoleBinding", "Deployment")
        yield [child for child in wanted.others if child["kind"] not in last]
        yield [self._startable(child) for child in wanted.others if child["kind"] in last]

    def _startable(self, child: Object) -> Object:
        if "paused" not in child.get("spec", {}):
            return child
        able = startable(child, self._known(child))
        return child if able is child else stamp(unstamped(able))

    def is_new(self, target: Target) -> bool:
        """Nothing of it is there yet."""
        key = target.namespace, target.name
        return not any(self.store.owned_names(kind, key) for kind in CHILDREN)

    def _known(self, child: Object) -> Object | None:
        meta = child["metadata"]
        return self.store.get(BY_KIND[child["kind"]], meta["namespace"], meta["name"])

    def forget(self, uid: str) -> None:
        self._secret_seen.pop(uid, None)
        self._waiting.pop(uid, None)
        self._alike.pop(uid, None)

    async def _apply_all(self, target: Target, groups: Iterable[Sequence[Object]], *, complete: bool) -> Applied:
        applied = Applied([])
        asked = blocked = False
        free = asyncio.Semaphore(AT_ONCE)
        for group in groups:
            if not asked and any(child["kind"] in _WORKLOADS for child in group):
                asked = not self._has_secret(target, group)
                applied.failures += await self._ensure_secret(target) if asked else []
                blocked = any(_blocks(failure, target) for failure in applied.failures)
            wanted = [child for child in group if not (blocked and child["kind"] in _WORKLOADS)]
            # Each for itself, side by side: a chain of a dozen answers would be what a change takes.
            changed = [child for child in wanted if not self._agrees(child)]
            work = [_within(free, self._apply_child(target, child, complete=complete)) for child in changed]
            for done in await asyncio.gather(*work):
                applied.failures += done.failures
                applied.repaired += done.repaired
                applied.sets_off = applied.sets_off or done.sets_off
        return applied

    def _agrees(self, child: Object) -> bool:
        """Whether it was found to be as it is wanted, and nobody has written it since."""
        meta = child["metadata"]
        version = self.store.version(BY_KIND[child["kind"]], meta["namespace"], meta["name"])
        found = self._alike.get(meta["ownerReferences"][0]["uid"], {}).get((child["kind"], meta["name"]))
        return version is not None and found == (version, applied_hash(child))

    def _has_secret(self, target: Target, desired: Iterable[Object]) -> bool:
        """Whether the Secret was seen, and nothing is worth another look, which scaling would wait for.

        A loss shows when pods start: where they are about to be made anew, or one has waited for a while.
        """
        now = self.clock.now()
        if any(is_pending(pod) for pod in self.store.owned(POD, (target.namespace, target.name))):
            since = self._waiting.setdefault(target.uid, now)
        else:
            since = now
            self._waiting.pop(target.uid, None)
        seen = self._secret_seen.get(target.uid)
        if seen is None:
            return False
        if now - seen < SECRET_RECHECK_SECONDS:
            return True
        return now - since < WAITING_SECONDS and not any(map(self._alters_pods, desired))

    def _alters_pods(self, child: Object) -> bool:
        if child["kind"] not in _WORKLOADS:
            return False
        known = self._known(child)
        if known is None:
            return True
        same = applied_hash(known) == applied_hash(child)
        return not same and difference(child["spec"]["template"], known["spec"]["template"]) is not None

    async def _ensure_secret(self, target: Target) -> list[Failure]:
        name = names.internal_secret(target.name)
        try:
            found = await self._make_secret(target, name) if self.is_new(target) else None
            if found is None:
                found = await self.api.get_metadata(SECRET, target.namespace, name)
            if found is None:
                found = await self._make_secret(target, name)
        except ApiError as error:
            return [failure_of(error)]
        refused = _refusal(found, target, "Secret", name) if found is not None else leaving("Secret", name)
        if refused is None:
            self._secret_seen[target.uid] = self.clock.now()
        return [refused] if refused else []

    async def _make_secret(self, target: Target, name: str) -> Object | None:
        """None where there is one of that name."""
        body = build_internal_secret(target, secrets.token_urlsafe(TOKEN_BYTES))
        try:
            made = await self.api.create(SECRET, target.namespace, body)
        except ApiError as error:
            if error.code != 409:
                raise
            return None
        log.info("%s/%s: created Secret %s", target.namespace, target.name, name)
        return made

    async def _apply_child(self, target: Target, child: Object, *, complete: bool) -> Applied:
        kind, name = BY_KIND[child["kind"]], child["metadata"]["name"]
        applied = Applied([])
        try:
            observed = self.store.get(kind, target.namespace, name)
            if observed is None:
                observed = await self._create_child(target, kind, child)
                if observed is None:
                    applied.sets_off = kind.kind in _WORKLOADS
                    fixed = repair(child, None, "new", complete=complete)
                    applied.repaired += [fixed] if fixed else []
                    return applied
            refused = _refusal(observed, target, kind.kind, name)
            if refused is not None:
                applied.failures.append(refused)
                return applied
            changed = difference(child, observed)
            if changed is not None:
                self.store.observe(kind, await self.api.apply(kind, child))
                applied.sets_off = kind.kind in _WORKLOADS
                log.info("%s/%s: applied %s %s (%s)", target.namespace, target.name, kind.kind, name, changed)
                fixed = repair(child, observed, changed, complete=complete)
                applied.repaired += [fixed] if fixed else []
            else:
                found = version_of(observed), applied_hash(child)
                self._alike.setdefault(target.uid, {})[kind.kind, name] = found
                self.store.observe(kind, observed)
        except ApiError as error:
            applied.failures.append(failure_of(error))
        return applied

    async def _create_child(self, target: Target, kind: Kind, child: Object) -> Object | None:
        """None where it is made; else the object that bears its name.

        It is not among our labelled objects and may still exist as somebody else's, which an apply would take over.
        """
        name = child["metadata"]["name"]
        try:
            made = await self.api.apply(kind, child, new=True)
        except ApiError as error:
            if error.code != 409:
                raise
            found = await self.api.get(kind, target.namespace, name)
            if found is None:
                # Gone between the two; the next pass makes it.
                raise
            return found
        self.store.observe(kind, made)
        log.info("%s/%s: applied %s %s (new)", target.namespace, target.name, kind.kind, name)
        return None

    async def _prune(self, target: Target, desired: list[Object]) -> list[Failure]:
        """Children of this deployment that are no longer wanted."""
        wanted = {(child["kind"], child["metadata"]["name"]) for child in desired}
        failures = []
        for kind in CHILDREN:
            for name in self.store.owned_names(kind, (target.namespace, target.name)):
                obj = None if (kind.kind, name) in wanted else self.store.get(kind, target.namespace, name)
                if obj is None or not _controlled(obj, target) or self._is_used(target, obj):
                    continue
                failure = await self._delete(target, kind, obj)
                if failure is not None:
                    failures.append(failure)
        return failures

    def _is_used(self, target: Target, obj: Object) -> bool:
        return is_used(obj, target, self.store.owned(POD, (target.namespace, target.name)))

    async def _delete(self, target: Target, kind: Kind, obj: Object) -> Failure | None:
        meta = obj["metadata"]
        if meta.get("deletionTimestamp"):
            return None
        try:
            await self.api.delete(kind, target.namespace, meta["name"], uid=meta["uid"])
        except ApiError as error:
            return failure_of(error)
        # Its event comes later, and a pass before that would delete it again.
        self.store.remove(kind, obj)
        log.info("%s/%s: deleted %s %s, no longer wanted", target.namespace, target.name, kind.kind, meta["name"])
        return None


async def _within(free: asyncio.Semaphore, work: Awaitable[Applied]) -> Applied:
    async with free:
        return await work


def _refusal(observed: Object, target: Target, kind: str, name: str) -> Failure | None:
    match ownership(observed, target):
        case Ownership.FOREIGN:
            return not_ours(kind, name)
        case Ownership.LEAVING:
            return leaving(kind, name)
        case Ownership.OURS:
            return None


def _blocks(failure: Failure, target: Target) -> bool:
    """A pod that starts without its secret only waits, under a name that is then in the way."""
    return failure.name == names.internal_secret(target.name)


def _controlled(obj: Object, target: Target) -> bool:
    return any(ref.get("controller") and ref["uid"] == target.uid for ref in obj["metadata"].get("ownerReferences", []))
