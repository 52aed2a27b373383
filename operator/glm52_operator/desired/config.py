"""The engine's configuration: the contract rendered into a ConfigMap."""

from __future__ import annotations

import hashlib
import json

from glm52_engine.config import (
    CONFIG_PATH,
    DiscoveryConfig,
    EngineConfig,
    ModelConfig,
)
from glm52_operator import names
from glm52_operator.desired.target import Object, Target, child, labels

CONFIG_KEY = CONFIG_PATH.rsplit("/", 1)[1]
CONFIG_DIR = CONFIG_PATH.rsplit("/", 1)[0]


def engine_config(target: Target) -> EngineConfig:
    """Everything that the pods share; raises pydantic's ValidationError where the contract is narrower than the API."""
    model = target.spec.model
    return EngineConfig(
        model=ModelConfig(
            name=model.name,
            path=target.model_path,
            max_model_len=model.max_model_len,
            weights_gib=model.weights_gib,
        ),
        prefill=target.role_config("prefill"),
        decode=target.role_config("decode"),
        drain=target.drain_config,
        discovery=DiscoveryConfig(
            namespace=target.namespace,
            prefill_service=names.role(target.name, "prefill"),
            decode_service=names.role(target.name, "decode"),
        ),
    )


def render(target: Target) -> str:
    return json.dumps(engine_config(target).model_dump(mode="json"), indent=2, sort_keys=True)


def config_hash(target: Target) -> str:
    """Stands in the pod templates, so that a changed configuration rolls the pods that read it only once."""
    return hashlib.sha256(render(target).encode()).hexdigest()[:16]


def build_config_map(target: Target) -> Object:
    return child(
        target,
        "v1",
        "ConfigMap",
        names.config_map(target.name),
        labels(target, "config"),
        data={CONFIG_KEY: render(target)},
    )
