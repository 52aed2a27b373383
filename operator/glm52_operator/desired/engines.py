"""One StatefulSet per role, all of whose pods run the engine."""

from __future__ import annotations

from glm52_engine.config import CONFIG_PATH, HOLD_ENV, LIVEZ, MODEL_MOUNT, READYZ, STARTUPZ, Role
from glm52_engine.sizing import SHARED_MEMORY, grace_period_seconds, startup_budget_seconds, stop_seconds
from glm52_operator import names
from glm52_operator.desired import pods
from glm52_operator.desired.config import kv_fingerprint
from glm52_operator.desired.target import Object, Target, child, role_labels

CONTAINER = "engine"
INIT_CONTAINER = "make-checkpoint"
STARTUP_PERIOD = 1


def build_stateful_set(target: Target, role: Role) -> Object:
    return child(
        target,
        "apps/v1",
        "StatefulSet",
        names.role(target.name, role),
        role_labels(target, role),
        spec={
            "replicas": target.pods(role),
            "serviceName": names.hosts(target.name, role),
            # Pods neither wait for each other at the start nor hold up the update that would repair a broken one.
            "podManagementPolicy": "Parallel",
            # Which pod goes next is planned over both roles, and by whole replicas: see plan.rollout.
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": names.selector(target.name, role)},
            "template": pods.template(target, role, _pod(target, role), {names.KV: kv_fingerprint(target)}),
        },
    )


def _pod(target: Target, role: Role) -> Object:
    config = target.role_config(role)
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(),
        "terminationGracePeriodSeconds": grace_period_seconds(config, target.drain_config),
        "topologySpreadConstraints": pods.spread(target, role, "controller-revision-hash"),
        "containers": [_engine(target, role)],
        "volumes": _volumes(target),
    }
    if target.spec.model.preset is not None:
        spec["initContainers"] = [_make_checkpoint(target, role)]
    return spec


def _engine(target: Target, role: Role) -> Object:
    config = target.role_config(role)
    budget = startup_budget_seconds(
        config, weights_gib=target.spec.model.weights_gib, accelerator=target.spec.accelerator
    )
    return pods.container(
        CONTAINER,
        target.image,
        ["serve", "--role", role, "--config", CONFIG_PATH, *_replica(target, role)],
        target.memory(role).per_host,
        env=[*pods.environment(), pods.field_variable(HOLD_ENV, f"metadata.annotations['{names.HOLD}']")],
        gpus=0 if target.spec.accelerator == "cpu" else config.ranks_per_host,
        ports=pods.http_port(),
        volumeMounts=[
            *pods.shared_mounts(),
            {"name": "models", "mountPath": MODEL_MOUNT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
        startupProbe=pods.http_probe(STARTUPZ, period=STARTUP_PERIOD, timeout=5, failures=-(-budget // STARTUP_PERIOD)),
        # What has hung for that long drains nothing, and a process that is frozen outlives TERM.
        livenessProbe=pods.http_probe(LIVEZ, period=10, timeout=5, failures=3)
        | {"terminationGracePeriodSeconds": stop_seconds(config)},
        readinessProbe=pods.http_probe(READYZ, period=2, timeout=5, failures=3),
        lifecycle={"preStop": {"exec": {"command": ["glm52-engine", "drain"]}}},
    )


def _replica(target: Target, role: Role) -> list[str]:
    """What the hosts of one replica find each other by; each knows from its own number which one it is."""
    hosts = target.hosts(role)
    domain = f"{names.hosts(target.name, role)}.{target.namespace}.svc"
    return ["--hosts", str(hosts), "--domain", domain] if hosts > 1 else []


def _make_checkpoint(target: Target, role: Role) -> Object:
    preset = str(target.spec.model.preset)
    return pods.container(
        INIT_CONTAINER,
        target.image,
        ["make-checkpoint", "--preset", preset, "--out", target.model_path],
        # Init containers run alone: the engine's own size costs the node nothing more.
        target.memory(role).per_host,
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}, {"name": "models", "mountPath": MODEL_MOUNT}],
    )


def _volumes(target: Target) -> list[Object]:
    source = {"emptyDir": {}} if target.spec.model.volume is None else dict(target.spec.model.volume)
    return [
        *pods.shared_volumes(target),
        {"name": "models", **source},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pods.quantity(SHARED_MEMORY)}},
    ]
