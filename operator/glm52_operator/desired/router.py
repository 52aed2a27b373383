"""The Deployment of the routers."""

from __future__ import annotations

from glm52_engine.config import CONFIG_PATH, LIVEZ, READYZ
from glm52_engine.sizing import PROPAGATION_SECONDS, ROUTER_MEMORY, SHUTDOWN_MARGIN_SECONDS
from glm52_operator import names
from glm52_operator.desired import pods
from glm52_operator.desired.target import Object, Target, child, role_labels

CONTAINER = "router"


def build_router(target: Target) -> Object:
    name = names.role(target.name, "router")
    return child(
        target,
        "apps/v1",
        "Deployment",
        name,
        role_labels(target, "router"),
        spec={
            "replicas": target.replicas("router"),
            **({"paused": True} if target.spec.rollout.paused else {}),
            # The old router leaves only when the new one serves: with one replica there is no gap.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": names.selector(target.name, "router")},
            "template": pods.template(target, "router", _pod(target, name)),
        },
    )


def _pod(target: Target, service_account: str) -> Object:
    window = target.spec.drain.window_seconds
    return {
        "serviceAccountName": service_account,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(),
        "terminationGracePeriodSeconds": PROPAGATION_SECONDS + window + SHUTDOWN_MARGIN_SECONDS,
        "topologySpreadConstraints": pods.spread(target, "router", "pod-template-hash"),
        "containers": [
            pods.container(
                CONTAINER,
                target.image,
                ["router", "--config", CONFIG_PATH],
                ROUTER_MEMORY,
                ports=pods.http_port(),
                volumeMounts=pods.shared_mounts(),
                startupProbe=pods.http_probe(LIVEZ, period=1, timeout=5, failures=120),
                livenessProbe=pods.http_probe(LIVEZ, period=10, timeout=5, failures=3),
                readinessProbe=pods.http_probe(READYZ, period=2, timeout=5, failures=3),
            )
        ],
        "volumes": pods.shared_volumes(target),
    }
