"""The deployment's internal secret: random, made once, never written again."""

from __future__ import annotations

import base64

from glm52_engine.config import INTERNAL_TOKEN_PATH
from glm52_operator import names
from glm52_operator.desired.target import Object, Target, child, labels

TOKEN_KEY = INTERNAL_TOKEN_PATH.rsplit("/", 1)[1]
TOKEN_DIR = INTERNAL_TOKEN_PATH.rsplit("/", 1)[0]


def build_internal_secret(target: Target, token: str) -> Object:
    return child(
        target,
        "v1",
        "Secret",
        names.internal_secret(target.name),
        labels(target, "internal"),
        type="Opaque",
        # Not immutable: a kubelet keeps such a Secret while any pod mounts it, and would give the old token to pods
        # of a deployment that was deleted and applied again meanwhile: its pods would refuse each other for ever.
        data={TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    )
