"""Why a pod does not serve, in words that say what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from glm52_engine.config import Hold, Outcome, Termination
from glm52_operator import names
from glm52_operator.plan.pods import Pod, is_leaving, is_ready, name

_LOG_TAIL = 600
"""Characters of a last log line that fit a message."""

_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
_CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
_IMAGE_REMEDY = "Check the image's name and tag (spec.image), and that the nodes may pull it."


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that will not pass by itself, or that a person should know of."""

    reason: str
    message: str


def worst(pods: Iterable[Pod]) -> Problem | None:
    """The most telling problem of several pods: a refusal by the engine explains more than a pod that waits."""
    found = [problem for pod in pods if (problem := diagnose(pod)) is not None]
    return min(found, key=lambda problem: (_rank(problem.reason), problem.message), default=None)


def _rank(reason: str) -> int:
    order = [
        "CrashLoop",
        "ConfigRefused",
        "OutOfMemory",
        "ImagePullBackOff",
        "ContainerConfigError",
        "Wedged",
        "Crashed",
        "Evicted",
    ]
    return order.index(reason) if reason in order else len(order)


def diagnose(pod: Pod) -> Problem | None:
    """The problem of one pod, or None while it is ready, leaving, or simply starting."""
    if is_ready(pod) or is_leaving(pod):
        return None
    status = pod.get("status", {})
    if status.get("phase") == "Failed" and not status.get("containerStatuses"):
        return Problem(
            status.get("reason") or "PodFailed",
            f"pod {name(pod)} failed: {status.get('message') or 'no message'}. It is made again by its controller.",
        )
    scheduling = _unscheduled(pod)
    if scheduling is not None:
        return scheduling
    if (hold := Hold.decode(_hold(pod))) is not None and hold.until is None:
        return Problem(
            "CrashLoop",
            f"pod {name(pod)} {hold.why} and is not started any more. Look at status.crashes, correct the cause, and "
            "change the specification to have it tried again.",
        )
    for container in _containers(status):
        problem = _container_problem(pod, container)
        if problem is not None:
            return problem
    return None


def _unscheduled(pod: Pod) -> Problem | None:
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            told = str(condition.get("message") or "the scheduler gives no reason").rstrip(". ")
            return Problem(
                str(condition.get("reason") or "Unschedulable"),
                f"pod {name(pod)} has no node: {told}. It asks for {_memory_limit(pod)} of memory. {_remedy(pod)}",
            )
    return None


def _remedy(pod: Pod) -> str:
    if pod["metadata"].get("labels", {}).get(names.ROLE) == names.ROUTER:
        return "Add a node that has it free, or lower router.replicas."
    return "Add a node that has it free, or lower hostPoolGiB, ranksPerHost, model.weightsGiB or replicas."


def _containers(status: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from status.get("initContainerStatuses", [])
    yield from status.get("containerStatuses", [])


def _container_problem(pod: Pod, container: dict[str, Any]) -> Problem | None:
    where = f"pod {name(pod)}, container {container['name']}"
    state = container.get("state", {})
    waiting = state.get("waiting", {})
    reason = waiting.get("reason", "")
    if reason in _IMAGE:
        # Both names alternate while the kubelet retries; one reason keeps the condition still.
        shown = "ImagePullBackOff" if reason == "ErrImagePull" else reason
        return Problem(shown, f"{where}: image {container.get('image')} cannot be pulled. {_IMAGE_REMEDY}")
    if reason in _CONFIG:
        return Problem("ContainerConfigError", f"{where}: {reason}: {waiting.get('message', '')}")
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    # An init container that ended well stays in the list for ever.
    if not ended or container.get("ready") or (state.get("terminated") and ended.get("exitCode") == 0):
        return None
    return _ended(pod, where, ended)


def _ended(pod: Pod, where: str, ended: dict[str, Any]) -> Problem | None:
    if ended.get("reason") == "OOMKilled":
        return Problem(
            "OutOfMemory",
            f"{where} was killed at its memory limit of {_memory_limit(pod)}. Raise model.weightsGiB to what the "
            "checkpoint "
            "takes, or lower hostPoolGiB or ranksPerHost.",
        )
    text = str(ended.get("message", "")).strip()
    told = Termination.decode(text)
    if told is None:
        tail = f": {text[-_LOG_TAIL:]}" if text else ""
        return Problem(
            "Crashed",
            f"{where} ended with exit code {ended.get('exitCode')}{tail}. See kubectl logs --previous {name(pod)}.",
        )
    if told.outcome in (Outcome.DRAINED, Outcome.DRAIN_TIMED_OUT):
        return None
    if told.outcome is Outcome.CONFIG_REFUSED:
        return Problem("ConfigRefused", f"{where} refuses its configuration: {told.message}")
    return Problem(
        told.outcome.value,
        f"{where} ended ({told.outcome.value}, exit code {ended.get('exitCode')}): {told.message}. "
        f"See kubectl logs --previous {name(pod)}.",
    )


def _hold(pod: Pod) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(names.HOLD, ""))


def _memory_limit(pod: Pod) -> str:
    containers = pod.get("spec", {}).get("containers", [])
    limits = containers[0].get("resources", {}).get("limits", {}) if containers else {}
    return str(limits.get("memory", "no limit"))
