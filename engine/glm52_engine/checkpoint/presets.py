"""The checkpoints that can be made on the spot, each as the files it consists of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm52_engine.checkpoint.architectures import demo_config, tiny_config
from glm52_engine.checkpoint.assets import CHAT_TEMPLATE, tokenizer_config, tokenizer_json
from glm52_engine.checkpoint.random_weights import random_weights
from glm52_engine.checkpoint.trained import DEMO, trained_merges, trained_weights
from glm52_engine.config import ConfigError

Files = dict[str, bytes]


def preset_files(preset: str) -> Files:
    """Contents by file name, the same on every machine.

    Raises ConfigError for an unknown preset, and for one whose trained weights are damaged.
    """
    if preset not in _MAKERS:
        raise ConfigError(f"preset: found {preset!r}; expected one of {sorted(_MAKERS)}")
    return _MAKERS[preset]()


def _tiny() -> Files:
    config = tiny_config()
    return _text_files(config, []) | {"model.safetensors": random_weights(config)}


def _demo() -> Files:
    merges = trained_merges(DEMO)
    return _text_files(demo_config(len(merges)), merges) | {"model.safetensors": trained_weights(DEMO)}


_MAKERS: dict[str, Callable[[], Files]] = {"tiny": _tiny, "demo": _demo}


def _text_files(config: Mapping[str, Any], merges: Sequence[tuple[str, str]]) -> Files:
    generation = {
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    texts = {
        "config.json": _dump(config),
        "generation_config.json": _dump(generation),
        "tokenizer.json": _dump(tokenizer_json(merges)),
        "tokenizer_config.json": _dump(tokenizer_config(config["max_position_embeddings"])),
        "chat_template.jinja": CHAT_TEMPLATE,
    }
    return {name: text.encode() for name, text in texts.items()}


def _dump(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
