"""The master of the store of prefixes: a small workload of its own beside the roles that use it."""

from __future__ import annotations

from glm52_engine.config import STORE_HEALTH_PORT, STORE_HEALTHZ, STORE_PORT
from glm52_engine.sizing import STORE_MASTER_MEMORY
from glm52_operator import names
from glm52_operator.desired import pods
from glm52_operator.desired.target import Object, Target, child, labels

CONTAINER = "store-master"
GRACE_SECONDS = 10


def build_store(target: Target) -> list[Object]:
    """Nothing where no role has a store."""
    if target.spec.kv_cache_offload is None:
        return []
    return [_service(target), _deployment(target)]


def _service(target: Target) -> Object:
    # An address of its own, so that clients need not ask for a name again when the master has moved.
    port = {"name": "rpc", "port": STORE_PORT, "protocol": "TCP", "targetPort": "rpc"}
    return child(
        target,
        "v1",
        "Service",
        names.store(target.name),
        labels(target, names.STORE),
        spec={"type": "ClusterIP", "selector": names.store_selector(target.name), "ports": [port]},
    )


def _deployment(target: Target) -> Object:
    return child(
        target,
        "apps/v1",
        "Deployment",
        names.store(target.name),
        labels(target, names.STORE),
        spec={
            "replicas": 0 if target.spec.suspend else 1,
            # Two masters behind one address would each know a part of the blocks.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": names.store_selector(target.name)},
            "template": {"metadata": {"labels": labels(target, names.STORE)}, "spec": _pod(target)},
        },
    )


def _pod(target: Target) -> Object:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(),
        # It holds no state that would have to go anywhere: who used it computes until the next one is there.
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [
            pods.container(
                CONTAINER,
                target.image,
                ["store-master"],
                STORE_MASTER_MEMORY,
                ports=[
                    {"name": "rpc", "containerPort": STORE_PORT, "protocol": "TCP"},
                    {"name": "http", "containerPort": STORE_HEALTH_PORT, "protocol": "TCP"},
                ],
                volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
                startupProbe=pods.http_probe(STORE_HEALTHZ, period=1, timeout=5, failures=120),
                livenessProbe=pods.http_probe(STORE_HEALTHZ, period=10, timeout=5, failures=3),
                readinessProbe=pods.http_probe(STORE_HEALTHZ, period=2, timeout=5, failures=3),
            )
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
