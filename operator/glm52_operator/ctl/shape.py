"""Observed objects in the shape that the decisions rely on.

The status code reads objects that the operator's own watch delivered. The tool is also given what a proxy, a newer API
server or a file says: what does not fit is left out here, once, instead of being asked for everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from glm52_operator.desired.target import Object

Fit = Callable[[Any], Any]

_DROP = object()


def _text(value: Any) -> Any:
    return value if isinstance(value, str) else _DROP


def _number(value: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else _DROP


def _flag(value: Any) -> Any:
    return value if isinstance(value, bool) else _DROP


def _anything(value: Any) -> Any:
    return _DROP if value is None else value


def _texts(value: Any) -> Any:
    """Labels and the like."""
    if not isinstance(value, dict):
        return _DROP
    return {key: inner for key, inner in value.items() if isinstance(key, str) and isinstance(inner, str)}


def _many(fit: Fit) -> Fit:
    """A list of records; members that are none are left out."""
    return lambda value: [fit(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else _DROP


def _record(fields: Mapping[str, Fit], **defaults: Any) -> Fit:
    """Known fields that fit; a record with defaults always is one."""

    def fit(value: Any) -> Any:
        if not isinstance(value, dict):
            return dict(defaults) if defaults else _DROP
        found = {key: inner(value.get(key)) for key, inner in fields.items()}
        return {**defaults, **{key: inner for key, inner in found.items() if inner is not _DROP}}

    return fit


_UNKNOWN = "unknown"

_METADATA = _record(
    {
        "name": _text,
        "namespace": _text,
        "uid": _text,
        "generation": _number,
        "creationTimestamp": _text,
        "deletionTimestamp": _text,
        "labels": _texts,
        "annotations": _texts,
    },
    name=_UNKNOWN,
    namespace=_UNKNOWN,
    uid="",
    labels={},
)

_CONDITIONS = _many(
    _record(
        {
            "type": _text,
            "status": _text,
            "reason": _text,
            "message": _text,
            "lastTransitionTime": _text,
            "observedGeneration": _number,
        },
        type=_UNKNOWN,
        status="Unknown",
        reason="",
        message="",
    )
)

_TERMINATED = _record({"reason": _text, "message": _text, "exitCode": _number, "startedAt": _text, "finishedAt": _text})
_STATE = _record(
    {
        "waiting": _record({"reason": _text, "message": _text}),
        "running": _record({"startedAt": _text}),
        "terminated": _TERMINATED,
    }
)
_CONTAINER_STATUSES = _many(
    _record(
        {
            "name": _text,
            "image": _text,
            "ready": _flag,
            "started": _flag,
            "restartCount": _number,
            "state": _STATE,
            "lastState": _STATE,
        },
        name=_UNKNOWN,
    )
)
_CONTAINERS = _many(
    _record(
        {
            "name": _text,
            "image": _text,
            "resources": _record({"limits": _texts}),
            "startupProbe": _record({"periodSeconds": _number, "failureThreshold": _number}),
        },
        name=_UNKNOWN,
    )
)

_POD = _record(
    {
        "metadata": _METADATA,
        "spec": _record({"nodeName": _text, "containers": _CONTAINERS}),
        "status": _record(
            {
                "phase": _text,
                "reason": _text,
                "message": _text,
                "conditions": _CONDITIONS,
                "containerStatuses": _CONTAINER_STATUSES,
                "initContainerStatuses": _CONTAINER_STATUSES,
            }
        ),
    },
    metadata=_METADATA({}),
)

_COUNTS = ("observedGeneration", "replicas", "readyReplicas", "updatedReplicas")
_WORKLOAD = _record(
    {
        "metadata": _METADATA,
        "spec": _record({"template": _record({"metadata": _METADATA})}),
        "status": _record(
            {
                **dict.fromkeys(_COUNTS, _number),
                "currentRevision": _text,
                "updateRevision": _text,
                "conditions": _CONDITIONS,
            }
        ),
    },
    metadata=_METADATA({}),
)

_DEPLOYMENT = _record(
    {
        "metadata": _METADATA,
        "spec": _anything,
        "status": _record({"observedGeneration": _number, "conditions": _CONDITIONS}),
    },
    metadata=_METADATA({}),
)


def pod(value: object) -> Object:
    return dict(_POD(value))


def workload(value: object) -> Object:
    """A StatefulSet or a Deployment."""
    return dict(_WORKLOAD(value))


def deployment(value: object) -> Object:
    """A GLM52Deployment."""
    return dict(_DEPLOYMENT(value))
