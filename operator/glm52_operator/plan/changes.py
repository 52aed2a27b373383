"""Does a child need to be applied? At rest the answer is no for every child, and nothing is written."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from glm52_operator import names
from glm52_operator.desired.target import Object
from glm52_operator.plan.quantity import same_quantity

_QUANTITY_PARENTS = frozenset({"limits", "requests"})
_QUANTITY_FIELDS = frozenset({"sizeLimit"})
_LIST_KEYS = ("mountPath", "uid", "name", "topologyKey")
_ABSENT = object()


def stamp(child: Object) -> Object:
    """The child with a hash of itself: a field that we no longer want leaves no other trace in the observed object."""
    text = json.dumps(child, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    meta = child["metadata"]
    annotations = {**meta.get("annotations", {}), names.APPLIED_HASH: digest}
    return {**child, "metadata": {**meta, "annotations": annotations}}


def unstamped(child: Object) -> Object:
    """The child without its hash, to be changed and stamped again."""
    annotations = {k: v for k, v in child["metadata"].get("annotations", {}).items() if k != names.APPLIED_HASH}
    meta = {key: value for key, value in child["metadata"].items() if key != "annotations"}
    return {**child, "metadata": {**meta, **({"annotations": annotations} if annotations else {})}}


def applied_hash(child: Object) -> str | None:
    """What `stamp` left; None on an object that we never applied."""
    found: str | None = child["metadata"].get("annotations", {}).get(names.APPLIED_HASH)
    return found


def startable(child: Object, observed: Object | None) -> Object:
    """The child as it can be applied now: a Deployment that is paused before its controller has seen it would never
    make a pod, so it is paused from then on."""
    seen = (observed or {}).get("status", {}).get("observedGeneration")
    if child["kind"] != "Deployment" or seen or "paused" not in child["spec"]:
        return child
    return {**child, "spec": {key: value for key, value in child["spec"].items() if key != "paused"}}


def difference(desired: Object, observed: Object) -> str | None:
    """Path of the first thing that an apply would change, or None.

    Everything that we want must be there; what others or the API server's defaults added is theirs.
    """
    return _differs(desired, observed, "")


def repair(desired: Object, observed: Object | None, changed: str, *, complete: bool) -> str | None:
    """What somebody else did to a child, in words; None where an apply is our own doing.

    `complete`: everything was there for this very specification, so that a missing child was deleted. A changed one
    still carries the hash of what we want now; the hash of a former version of us is another.
    """
    what = f"{desired['kind']} {desired['metadata']['name']}"
    if observed is None:
        return f"{what} was missing and was made again." if complete else None
    if applied_hash(observed) != applied_hash(desired):
        return None
    return f"{what} was changed at {changed} by somebody else and was put right."


def _differs(desired: Any, observed: Any, path: str) -> str | None:
    if isinstance(desired, dict):
        if not isinstance(observed, dict):
            return None if observed is _ABSENT and not desired else path
        for key, value in desired.items():
            found = _differs(value, observed.get(key, _ABSENT), f"{path}.{key}")
            if found is not None:
                return found
        return None
    if isinstance(desired, list):
        return _list_differs(desired, observed, path)
    if desired == observed and isinstance(desired, bool) == isinstance(observed, bool):
        return None
    if _is_quantity(path) and same_quantity(desired, observed):
        return None
    return path


def _list_differs(desired: list[Any], observed: Any, path: str) -> str | None:
    if not isinstance(observed, list):
        return None if observed is _ABSENT and not desired else path
    key = _merge_key(desired)
    if key is None:
        if len(desired) != len(observed):
            return path
        pairs = [(f"{path}[{n}]", *both) for n, both in enumerate(zip(desired, observed, strict=True))]
    else:
        have = {item[key]: item for item in observed if isinstance(item, dict) and key in item}
        pairs = [(f"{path}[{item[key]}]", item, have.get(item[key], _ABSENT)) for item in desired]
    for where, want, present in pairs:
        found = _differs(want, present, where)
        if found is not None:
            return found
    return None


def _merge_key(items: list[Any]) -> str | None:
    """Lists of objects that the API server merges by a key may have foreign members and another order."""
    if not items or not all(isinstance(item, dict) for item in items):
        return None
    return next((key for key in _LIST_KEYS if all(key in item for item in items)), None)


def _is_quantity(path: str) -> bool:
    parts = path.rsplit(".", 2)
    return parts[-1] in _QUANTITY_FIELDS or (len(parts) > 1 and parts[-2] in _QUANTITY_PARENTS)
