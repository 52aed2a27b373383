"""Makes the children of one deployment what they should be, and reports what the API server refused."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field

from glm52_operator import names
from glm52_operator.desired.children import build
from glm52_operator.desired.secret import build_internal_secret
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.changes import difference, repair, stamp
from glm52_operator.plan.failures import Failure, classify, leaving, not_ours
from glm52_operator.plan.ownership import Ownership, ownership
from glm52_operator.reconcile.client import Api, ApiError
from glm52_operator.reconcile.clock import Clock
from glm52_operator.reconcile.kinds import BY_KIND, CHILDREN, SECRET, Kind
from glm52_operator.reconcile.store import Store

log = logging.getLogger("glm52.apply")

TOKEN_BYTES = 32
SECRET_RECHECK_SECONDS = 30.0
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


@dataclass(slots=True)
class Applier:
    api: Api
    store: Store
    clock: Clock
    _secret_seen: dict[str, float] = field(default_factory=dict)
    """uid of a deployment → when its Secret was last seen; a watch of Secrets would need the right to read them all."""

    async def apply(self, target: Target, *, complete: bool) -> Applied:
        """Apply what differs. Workloads wait until everything that their pods mount is there.

        `complete`: all children were there for this specification, so a missing one was taken away.
        """
        applied = Applied(await self._ensure_secret(target))
        desired = [stamp(child) for child in build(target)]
        for child in desired:
            if child["kind"] in _WORKLOADS and any(_blocks(failure, target) for failure in applied.failures):
                continue
            await self._apply_child(target, child, applied, complete)
        applied.failures += await self._prune(target, desired)
        return applied

    def forget(self, uid: str) -> None:
        self._secret_seen.pop(uid, None)

    async def _ensure_secret(self, target: Target) -> list[Failure]:
        name = names.internal_secret(target.name)
        seen = self._secret_seen.get(target.uid)
        if seen is not None and self.clock.now() - seen < SECRET_RECHECK_SECONDS:
            return []
        try:
            found = await self.api.get_metadata(SECRET, target.namespace, name)
            if found is None:
                body = build_internal_secret(target, secrets.token_urlsafe(TOKEN_BYTES))
                found = await self.api.create(SECRET, target.namespace, body)
                log.info("%s/%s: created Secret %s", target.namespace, target.name, name)
        except ApiError as error:
            return [failure_of(error)]
        refused = _refusal(found, target, "Secret", name)
        if refused is None:
            self._secret_seen[target.uid] = self.clock.now()
        return [refused] if refused else []

    async def _apply_child(self, target: Target, child: Object, applied: Applied, complete: bool) -> None:
        kind, name = BY_KIND[child["kind"]], child["metadata"]["name"]
        try:
            observed = self.store.get(kind, target.namespace, name)
            if observed is None:
                # Not among our labelled objects; it may still exist as somebody else's, which an apply would take over.
                observed = await self.api.get(kind, target.namespace, name)
            if observed is not None:
                refused = _refusal(observed, target, kind.kind, name)
                if refused is not None:
                    applied.failures.append(refused)
                    return
            changed = "new" if observed is None else difference(child, observed)
            if changed is not None:
                self.store.observe(kind, await self.api.apply(kind, child))
                log.info("%s/%s: applied %s %s (%s)", target.namespace, target.name, kind.kind, name, changed)
                fixed = repair(child, observed, changed, complete=complete)
                applied.repaired += [fixed] if fixed else []
            elif observed is not None:
                self.store.observe(kind, observed)
        except ApiError as error:
            applied.failures.append(failure_of(error))

    async def _prune(self, target: Target, desired: list[Object]) -> list[Failure]:
        """Children of this deployment that are no longer wanted."""
        wanted = {(child["kind"], child["metadata"]["name"]) for child in desired}
        failures = []
        for kind in CHILDREN:
            for obj in list(self.store.owned(kind, (target.namespace, target.name))):
                if (kind.kind, obj["metadata"]["name"]) in wanted or not _controlled(obj, target):
                    continue
                failure = await self._delete(target, kind, obj)
                if failure is not None:
                    failures.append(failure)
        return failures

    async def _delete(self, target: Target, kind: Kind, obj: Object) -> Failure | None:
        meta = obj["metadata"]
        if meta.get("deletionTimestamp"):
            return None
        try:
            await self.api.delete(kind, target.namespace, meta["name"], uid=meta["uid"])
        except ApiError as error:
            return failure_of(error)
        log.info("%s/%s: deleted %s %s, no longer wanted", target.namespace, target.name, kind.kind, meta["name"])
        return None


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
