"""The checkpoints that can be made on the spot, each as the files it consists of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from glm52_engine.checkpoint.architectures import tiny_config
from glm52_engine.checkpoint.assets import CHAT_TEMPLATE, tokenizer_config, tokenizer_json
from glm52_engine.checkpoint.random_weights import random_weights
from glm52_engine.config import ConfigError


def preset_files(preset: str) -> dict[str, bytes]:
    """Contents by file name, the same on every machine; raises ConfigError for an unknown preset."""
    if preset not in _CONFIGS:
        raise ConfigError(f"preset: found {preset!r}; expected one of {sorted(_CONFIGS)}")
    config = _CONFIGS[preset]
    files = {name: text.encode() for name, text in _text_files(config).items()}
    return {**files, "model.safetensors": random_weights(config)}


def _text_files(config: Mapping[str, Any]) -> dict[str, str]:
    generation = {
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    return {
        "config.json": _dump(config),
        "generation_config.json": _dump(generation),
        "tokenizer.json": _dump(tokenizer_json()),
        "tokenizer_config.json": _dump(tokenizer_config(config["max_position_embeddings"])),
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def _dump(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


_CONFIGS: dict[str, dict[str, Any]] = {"tiny": tiny_config()}
