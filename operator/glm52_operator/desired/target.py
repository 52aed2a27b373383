"""What the builders build for: one deployment with its specification resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glm52_engine.config import MODEL_MOUNT, STORE_PORT, DrainConfig, HiSparseConfig, Role, RoleConfig, StoreConfig
from glm52_engine.sizing import HostMemory, host_memory
from glm52_operator import names
from glm52_operator.api.spec import DecodeSpec, PrefillSpec, RoleSpec, Spec

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """One GLM52Deployment whose specification was read and found valid."""

    name: str
    namespace: str
    uid: str
    spec: Spec
    image: str

    def replicas(self, component: names.Component) -> int:
        """Replicas that shall run now."""
        return 0 if self.spec.suspend else self.wanted(component)

    def wanted(self, component: names.Component) -> int:
        """Replicas that shall run unless the deployment is suspended."""
        return getattr(self.spec, component).replicas  # type: ignore[no-any-return]

    def hosts(self, component: names.Component) -> int:
        """Pods of one replica."""
        return 1 if component == names.ROUTER else self._size(component).hosts_per_replica

    def pods(self, component: names.Component) -> int:
        return self.replicas(component) * self.hosts(component)

    def disruptable(self, component: names.Component) -> int:
        """Pods of a component that may be missing when another one is evicted, that one included.

        The other hosts of its replica go with an evicted one and need no room: if there were some for all of them, as
        many replicas would each lose a host.
        """
        if component == names.ROUTER:
            return 1
        return (self.spec.rollout.max_unavailable - 1) * self.hosts(component) + 1

    def _size(self, role: Role) -> RoleSpec:
        return self.spec.prefill if role == "prefill" else self.spec.decode

    def role_config(self, role: Role) -> RoleConfig:
        own = self._size(role)
        return RoleConfig(
            ranks_per_host=own.ranks_per_host,
            host_pool_gib=own.host_pool_gib,
            max_num_seqs=own.max_num_seqs,
            max_waiting=own.max_waiting,
            prefix_cache=isinstance(own, PrefillSpec) and own.prefix_cache,
            launch_ahead=isinstance(own, DecodeSpec) and own.launch_ahead,
            gpu_memory_percent=own.gpu_memory_percent,
            hi_sparse=_hi_sparse(own),
            store=self._store(role),
        )

    def memory(self, role: Role) -> HostMemory:
        return host_memory(
            self.role_config(role), weights_gib=self.spec.model.weights_gib, accelerator=self.spec.accelerator
        )

    def _store(self, role: Role) -> StoreConfig | None:
        asked = self.spec.kv_cache_offload
        if asked is None or role not in asked.roles:
            return None
        return StoreConfig(
            master=f"{names.store(self.name)}.{self.namespace}.svc:{STORE_PORT}", store_gib=asked.store_gib
        )

    @property
    def drain_config(self) -> DrainConfig:
        return DrainConfig(window_seconds=self.spec.drain.window_seconds)

    @property
    def model_path(self) -> str:
        return self.spec.model.path or f"{MODEL_MOUNT}/{self.spec.model.preset}"


def _hi_sparse(role: RoleSpec) -> HiSparseConfig | None:
    asked = role.hi_sparse if isinstance(role, DecodeSpec) else None
    return None if asked is None else HiSparseConfig(mode=asked.mode, device_buffer_size=asked.device_buffer_size)


def labels(target: Target, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "glm52",
        "app.kubernetes.io/instance": target.name,
        names.COMPONENT: component,
        "app.kubernetes.io/part-of": "glm52",
        names.MANAGED_BY: names.MANAGER,
        names.NAME: target.name,
    }


def role_labels(target: Target, component: names.Component) -> dict[str, str]:
    """Labels of everything that belongs to one role or to the router, its pods included."""
    own = {**labels(target, component), names.ROLE: component}
    if component != "router":
        own[names.LLMD_ROLE] = component
    return own


def metadata(target: Target, name: str, own: dict[str, str]) -> Object:
    return {
        "name": name,
        "namespace": target.namespace,
        "labels": own,
        "ownerReferences": [owner_reference(target)],
    }


def owner_reference(target: Target) -> Object:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": target.name,
        "uid": target.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child(target: Target, api_version: str, kind: str, name: str, own: dict[str, str], **body: Any) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata(target, name, own), **body}
