"""Every name, label and annotation that the operator derives; one place, so that limits can be proven here."""

from __future__ import annotations

from typing import Literal

from glm52_engine.config import Role

GROUP = "glm52.dev"
VERSION = "v1alpha1"
KIND = "GLM52Deployment"
PLURAL = "glm52deployments"
API_VERSION = f"{GROUP}/{VERSION}"
CRD_NAME = f"{PLURAL}.{GROUP}"

MANAGER = "glm52-operator"
"""Field manager of every apply, and the value of app.kubernetes.io/managed-by."""

MAX_NAME = 40
"""A StatefulSet's pods carry `<statefulset>-<10 character hash>` in a label of at most 63 characters, which leaves 52;
the longest suffix of a StatefulSet is `-prefill`, of a Service `-prefill-hosts`: 40 keeps four characters in hand."""

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT = "app.kubernetes.io/component"
NAME = f"{GROUP}/name"
ROLE = f"{GROUP}/role"
LLMD_ROLE = "llm-d.ai/role"

APPLIED_HASH = f"{GROUP}/applied-hash"
CONFIG = f"{GROUP}/config"
"""Annotation of a pod: the engine's configuration, which the pod mounts as a file."""
RESTART = f"{GROUP}/restart"
"""Annotation of a pod: spec.restart when its template was made."""
HOLD = f"{GROUP}/hold"
"""Annotation of a pod, made by the operator after crashes: how long its engine waits when it starts again."""
KV = f"{GROUP}/kv"
"""Label of an engine pod: pods of both roles that carry the same value can exchange KV."""

ROLES: tuple[Role, Role] = ("prefill", "decode")
ROUTER: Literal["router"] = "router"
Component = Literal["prefill", "decode", "router"]


def role(name: str, role: Component) -> str:
    """Workload and ready-only Service of a role, and the router's own objects."""
    return f"{name}-{role}"


def hosts(name: str, role: Role) -> str:
    """Headless Service that gives every host of a replica of several a stable DNS name, ready or not."""
    return f"{name}-{role}-hosts"


def internal_secret(name: str) -> str:
    return f"{name}-internal"


STORE = "store"


def store(name: str) -> str:
    """Master of the store of prefixes, and its Service."""
    return f"{name}-{STORE}"


def store_selector(name: str) -> dict[str, str]:
    """Its pods carry no role: they serve no requests, and no rollout or drain of a role is about them."""
    return {MANAGED_BY: MANAGER, NAME: name, COMPONENT: STORE}


def selector(name: str, role: Component) -> dict[str, str]:
    """Labels that pick the pods of one role over all revisions: a selector can never change."""
    return {MANAGED_BY: MANAGER, NAME: name, ROLE: role}


def selector_text(name: str, role: Component) -> str:
    return ",".join(f"{key}={value}" for key, value in selector(name, role).items())
