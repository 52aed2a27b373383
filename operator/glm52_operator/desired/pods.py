"""What engine and router pods have in common: hardening, environment, mounts, spreading."""

from __future__ import annotations

from glm52_engine.config import API_PORT, TERMINATION_LOG_PATH
from glm52_engine.sizing import GIB, MIB
from glm52_operator import names
from glm52_operator.desired import config
from glm52_operator.desired.secret import TOKEN_DIR
from glm52_operator.desired.target import Object, Target, role_labels

GPU = "nvidia.com/gpu"
"""Resource name of NVIDIA's device plugin."""

USER = 10001
"""uid and gid of both images."""


def quantity(size: int) -> str:
    """Bytes in the largest binary unit that holds them exactly, the form in which the API server gives them back."""
    for unit, suffix in ((1 << 40, "Ti"), (GIB, "Gi"), (MIB, "Mi"), (1 << 10, "Ki")):
        if size and size % unit == 0:
            return f"{size // unit}{suffix}"
    return str(size)


def pod_security() -> Object:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # A big checkpoint volume is not walked at every start only to set a group that is set already.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def environment() -> list[Object]:
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_IP": "status.podIP",
        "NODE_NAME": "spec.nodeName",
    }
    return [field_variable(name, path) for name, path in fields.items()]


def field_variable(name: str, path: str) -> Object:
    """An environment variable that the kubelet fills from the pod itself, anew at each start of the container."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def shared_volumes(target: Target) -> list[Object]:
    return [
        config.volume(),
        {
            "name": "internal",
            "secret": {"secretName": names.internal_secret(target.name), "defaultMode": config.READ_ALL},
        },
        {"name": "tmp", "emptyDir": {}},
    ]


def shared_mounts() -> list[Object]:
    return [
        {"name": "config", "mountPath": config.CONFIG_DIR, "readOnly": True},
        {"name": "internal", "mountPath": TOKEN_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]


def container(name: str, image: str, args: list[str], memory: int, *, gpus: int = 0, **rest: object) -> Object:
    limits = {"memory": quantity(memory)} | ({GPU: str(gpus)} if gpus else {})
    return {
        "name": name,
        "image": image,
        "args": args,
        "env": environment(),
        # No CPU limit: throttling would stretch every step; memory request = limit: nobody is evicted for a neighbour.
        "resources": {"requests": {"cpu": "250m", **limits}, "limits": limits},
        "securityContext": container_security(),
        "terminationMessagePath": TERMINATION_LOG_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **rest,
    }


def http_port() -> list[Object]:
    return [{"name": "http", "containerPort": API_PORT, "protocol": "TCP"}]


def http_probe(path: str, *, period: int, timeout: int, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def spread(target: Target, component: names.Component, revision_label: str) -> list[Object]:
    """Pods of one role on different nodes where there are any; counted per revision, or an update would skew them."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": names.selector(target.name, component)},
            "matchLabelKeys": [revision_label],
        }
    ]


def template(target: Target, component: names.Component, spec: Object, labels: dict[str, str] | None = None) -> Object:
    annotations = {names.CONFIG: config.render(target, component)}
    if target.spec.restart:
        annotations[names.RESTART] = target.spec.restart
    return {
        "metadata": {"labels": {**role_labels(target, component), **(labels or {})}, "annotations": annotations},
        "spec": spec,
    }
