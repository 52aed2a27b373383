"""The engine's configuration: the contract rendered into the pods that read it."""

from __future__ import annotations

import hashlib
import json

from glm52_engine.config import (
    CONFIG_PATH,
    DiscoveryConfig,
    EngineConfig,
    KvTransferConfig,
    ModelConfig,
)
from glm52_operator import names
from glm52_operator.desired.target import Object, Target

CONFIG_KEY = CONFIG_PATH.rsplit("/", 1)[1]
CONFIG_DIR = CONFIG_PATH.rsplit("/", 1)[0]
READ_ALL = 0o444


def engine_config(target: Target, component: names.Component) -> EngineConfig:
    """What one component reads; raises pydantic's ValidationError where the contract is narrower than the API."""
    model = target.spec.model
    return EngineConfig(
        model=ModelConfig(
            name=model.name,
            path=target.model_path,
            max_model_len=model.max_model_len,
            kv_cache_dtype=model.kv_cache_dtype,
            weights_gib=model.weights_gib,
        ),
        prefill=target.role_config("prefill") if component == "prefill" else None,
        decode=target.role_config("decode") if component == "decode" else None,
        drain=target.drain_config,
        accelerator=target.spec.accelerator,
        kv_transfer=None if component == names.ROUTER else _kv_transfer(target),
        discovery=_discovery(target) if component == names.ROUTER else None,
    )


def _kv_transfer(target: Target) -> KvTransferConfig | None:
    asked = target.spec.kv_transfer
    return None if asked is None else KvTransferConfig(net_devices=asked.net_devices, checksums=asked.checksums)


def _discovery(target: Target) -> DiscoveryConfig:
    return DiscoveryConfig(
        namespace=target.namespace,
        prefill_service=names.role(target.name, "prefill"),
        decode_service=names.role(target.name, "decode"),
        prefill_hosts=target.hosts("prefill"),
        decode_hosts=target.hosts("decode"),
    )


def render(target: Target, component: names.Component) -> str:
    return json.dumps(engine_config(target, component).model_dump(mode="json", exclude_none=True), sort_keys=True)


def volume() -> Object:
    """The configuration as a file, from the pod's own annotation.

    A ConfigMap would change under the pods of the revision before, and a container that restarts in the middle of a
    rollout would read a configuration that its memory was not sized for.
    """
    path = f"metadata.annotations['{names.CONFIG}']"
    item = {"path": CONFIG_KEY, "fieldRef": {"apiVersion": "v1", "fieldPath": path}}
    return {"name": "config", "downwardAPI": {"items": [item], "defaultMode": READ_ALL}}


def kv_fingerprint(target: Target) -> str:
    """Equal for pods that can exchange KV: the model, what may lay its KV out differently, and so the image."""
    model = target.spec.model
    parts = {
        "image": target.image,
        "preset": model.preset,
        "path": model.path,
        "volume": model.volume,
        # `auto` is another type on another accelerator.
        "kvCacheDtype": (model.kv_cache_dtype, target.spec.accelerator),
        "block": EngineConfig.model_fields["block_size"].default,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
