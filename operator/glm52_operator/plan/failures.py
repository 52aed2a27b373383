"""What the API server refused, in words that name the verb, the object and the remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from glm52_operator import names


@dataclass(frozen=True, slots=True)
class Failure:
    """One write or read that did not work."""

    reason: str
    message: str
    kind: str
    name: str
    transient: bool = False
    """Worth a retry without telling anybody: conflicts, overload, a connection that broke."""
    config: bool = False
    """The specification asks for something that the API server will never take."""


_LACKS = re.compile(r"cannot (\w+) resource \"([^\"]+)\" in API group \"([^\"]*)\"")


def grant(text: str, verb: str, resource: str) -> str:
    """What to grant. The API server's words count before ours: an apply that creates lacks `create` and not `patch`."""
    found = _LACKS.search(text)
    if found is not None:
        verb, whole, group = found.groups()
        plural, slash, subresource = whole.partition("/")
        resource = (f"{plural}.{group}" if group else plural) + slash + subresource
    return f"Grant the operator's service account the verb {verb!r} on {resource!r} (see the chart's RBAC)."


def classify(*, code: int, text: str, verb: str, resource: str, kind: str, name: str) -> Failure:
    """Sort an API error; code 0 is a connection that broke or timed out."""
    what = f"cannot {verb} {kind} {name}"
    if code == 403 and "exceeded quota" in text:
        return Failure("QuotaExceeded", f"{what}: {text}. Raise the ResourceQuota or ask for less.", kind, name)
    if code == 403 and "is forbidden: User" in text:
        return Failure("Forbidden", f"{what}: {text}. {grant(text, verb, resource)}", kind, name)
    if code == 403 and "being terminated" in text:
        return Failure("NamespaceTerminating", f"{what}: {text}.", kind, name, transient=True)
    if code == 403:
        return Failure(
            "Forbidden", f"{what}: {text}. An admission rule or a missing permission refuses it.", kind, name
        )
    if code == 422 and ("forbidden" in text.lower() or "immutable" in text.lower()):
        remedy = (
            f"The field cannot be changed in place: take the change back, or delete the {kind} with --cascade=orphan "
            "and let "
            "the operator make it again."
        )
        return Failure("ImmutableField", f"{what}: {text}. {remedy}", kind, name, config=True)
    # A field that no schema knows is refused by server-side apply with a 500, before validation sees it.
    if code in (400, 422) or (code == 500 and "field not declared in schema" in text):
        remedy = "Correct the field of the specification that this comes from and apply again."
        return Failure("Refused", f"{what}: {text}. {remedy}", kind, name, config=True)
    if code == 0:
        return Failure("ApiUnreachable", f"{what}: {text}. The operator tries again.", kind, name, transient=True)
    return Failure("ApiError", f"{what}: {text} (HTTP {code}). The operator tries again.", kind, name, transient=True)


def not_ours(kind: str, name: str) -> Failure:
    return Failure(
        "NameTaken",
        f"{kind} {name} exists and does not belong to this {names.KIND}: it is left alone. Delete or rename it, or "
        "create the "
        f"{names.KIND} under another name.",
        kind,
        name,
    )


def leaving(kind: str, name: str) -> Failure:
    return Failure(
        "WaitingForDeletion",
        f"{kind} {name} is still being deleted; it is made again as soon as it is gone. If this lasts, look for "
        "finalizers on it.",
        kind,
        name,
        transient=True,
    )
