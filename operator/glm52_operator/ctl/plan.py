"""What the operator would make of a deployment, as text: the children, and the sums behind memory and times."""

from __future__ import annotations

from collections.abc import Sequence

from glm52_engine.config import Role
from glm52_engine.sizing import (
    GPU_START_SECONDS,
    LOAD_SECONDS_PER_GIB,
    PROPAGATION_SECONDS,
    SHUTDOWN_MARGIN_SECONDS,
    START_SECONDS,
    gib,
    unpin_seconds,
)
from glm52_operator import names
from glm52_operator.ctl.text import table
from glm52_operator.desired.children import build
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.quantity import parse_quantity
from glm52_operator.plan.rollout import preview
from glm52_operator.status.compute import url

_COMPONENTS: tuple[names.Component, ...] = (*names.ROLES, names.ROUTER)
_WORKLOADS = {"StatefulSet", "Deployment"}
_STEPS = 12
"""Steps of a rollout that are listed."""


def describe(target: Target, where: str) -> str:
    """The whole plan of one deployment."""
    children = build(target)
    return "\n".join(
        [
            *_head(target, where),
            *_children(target, children),
            *_memory(target, children),
            *_times(target, children),
            *_rollout(target),
        ]
    )


def _head(target: Target, where: str) -> list[str]:
    model = target.spec.model
    source = f"preset {model.preset}" if model.preset else f"checkpoint {model.path}"
    hosts = [
        [role, f"{names.role(target.name, role)}-0.{names.hosts(target.name, role)}.{target.namespace}.svc"]
        for role in names.ROLES
        if target.hosts(role) > 1
    ]
    rows = [
        ["model", f"{model.name}: {source}, at most {model.max_model_len} tokens a request"],
        ["image", target.image],
        ["url", url(target)],
        ["scale selector", names.selector_text(target.name, "decode")],
        *([f"{role} host", host] for role, host in hosts),
    ]
    return [f"{names.KIND} {target.name} in namespace {target.namespace} ({where})", *table(rows), ""]


def _children(target: Target, children: Sequence[Object]) -> list[str]:
    rows = [["Secret", names.internal_secret(target.name), "random token, made once and never written again"]]
    rows += [[child["kind"], child["metadata"]["name"], _note(child)] for child in children]
    return [f"{len(rows)} children, in the order in which they are applied", *table(rows), ""]


def _note(child: Object) -> str:
    spec = child.get("spec", {})
    if child["kind"] in _WORKLOADS:
        count = spec["replicas"]
        return f"{count} pod{'' if count == 1 else 's'}"
    if child["kind"] == "Service":
        ports = ", ".join(str(port["nodePort"]) for port in spec["ports"] if "nodePort" in port)
        kind = "headless" if spec.get("clusterIP") == "None" else spec["type"]
        return f"{kind}, node port {ports}" if ports else kind
    return ""


def _memory(target: Target, children: Sequence[Object]) -> list[str]:
    rows, pods, total = [["role", "pods", "together", "one pod"]], 0, 0
    for component in _COMPONENTS:
        size, count = _pod_memory(target, component, children), target.pods(component)
        one = gib(size) if component == "router" else target.memory(component).explain()
        rows.append([component, str(count), gib(size * count), one])
        pods, total = pods + count, total + size * count
    rows.append(["all", str(pods), gib(total), ""])
    return ["Memory, request = limit", *table(rows), ""]


def _pod_memory(target: Target, component: names.Component, children: Sequence[Object]) -> int:
    """Bytes, as they stand in the pod."""
    (container,) = _pod(target, component, children)["containers"]
    return int(parse_quantity(container["resources"]["limits"]["memory"]) or 0)


def _pod(target: Target, component: names.Component, children: Sequence[Object]) -> Object:
    name = names.role(target.name, component)
    found = next(c for c in children if c["kind"] in _WORKLOADS and c["metadata"]["name"] == name)
    pod: Object = found["spec"]["template"]["spec"]
    return pod


def _times(target: Target, children: Sequence[Object]) -> list[str]:
    rows = [["role", "liveness", "readiness", "startup probe", "grace period"]]
    for component in _COMPONENTS:
        pod = _pod(target, component, children)
        (container,) = pod["containers"]
        startup = container["startupProbe"]
        budget = startup["failureThreshold"] * startup["periodSeconds"]
        why = f" = {_startup_sum(target, component)}" if component != "router" else ""
        grace = f"{pod['terminationGracePeriodSeconds']} = {_grace_sum(target, component)}"
        probes = (f"{p['failureThreshold']} × {p['periodSeconds']}" for p in _probes(container))
        rows.append([component, *probes, f"{budget}{why}", grace])
    return ["Times in seconds: a probe's failures × period, most time to start, most time to leave", *table(rows)]


def _rollout(target: Target) -> list[str]:
    steps = list(preview(target, new_kv=True))
    rows = [["step", *names.ROLES]]
    for number, step in enumerate(steps[:_STEPS], start=1):
        gone = {role: [str(taken.replica) for taken in step if taken.role == role] for role in names.ROLES}
        rows.append([str(number), *(", ".join(gone[role]) or "-" for role in names.ROLES)])
    head = (
        "A new image or model: replicas that are replaced in each step, drained, while the others serve "
        f"(maxUnavailable {target.spec.rollout.max_unavailable})"
    )
    left = len(steps) - _STEPS
    return ["", head, *table(rows), *([f"  and {left} more steps"] if left > 0 else [])] if steps else []


def _probes(container: Object) -> tuple[Object, Object]:
    return container["livenessProbe"], container["readinessProbe"]


def _startup_sum(target: Target, role: Role) -> str:
    config, weights = target.role_config(role), target.spec.model.weights_gib
    pools = config.ranks_per_host * config.host_pool_gib
    kernels = "" if target.spec.accelerator == "cpu" else f" + {GPU_START_SECONDS} kernels"
    return f"{START_SECONDS} base{kernels} + {LOAD_SECONDS_PER_GIB} × {weights} GiB of weights + {pools} GiB of pools"


def _grace_sum(target: Target, component: names.Component) -> str:
    window = target.spec.drain.window_seconds
    unpin = "" if component == "router" else f" + {unpin_seconds(target.role_config(component))} unpin"
    return f"{PROPAGATION_SECONDS} propagation + {window} drain window{unpin} + {SHUTDOWN_MARGIN_SECONDS} margin"
