"""GLM52Deployments as the tests apply them."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def deployment(name: str, *, node_port: int | None = None, **spec: Any) -> Object:
    """A small deployment: one prefill, one decode, one router, the tiny preset; `spec` replaces whole fields."""
    service: Object = {"type": "NodePort", "nodePort": node_port} if node_port else {"type": "ClusterIP"}
    return {
        "apiVersion": "glm52.dev/v1alpha1",
        "kind": "GLM52Deployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"preset": "tiny", "maxModelLen": 2048},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
            "router": {"replicas": 1, "service": service},
            "drain": {"windowSeconds": 30},
            # Wrong bytes must be an error here and not other tokens.
            "kvTransfer": {"checksums": True},
            **spec,
        },
    }
