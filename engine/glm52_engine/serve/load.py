"""Everything slow of an engine pod's start; runs on a thread while the HTTP server already answers its probes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from glm52_engine.config import EngineConfig, Role
from glm52_engine.runtime.types import Engine
from glm52_engine.tokenizer import Tokenizer


def load_engine(
    config: EngineConfig, role: Role, on_phase: Callable[[str], None]
) -> tuple[Engine, Tokenizer, type[Exception]]:
    """The engine, its tokenizer, and what its calls raise when it stops. Raises ConfigError for what can never work."""
    on_phase("reading the tokenizer")
    tokenizer = Tokenizer.load(Path(config.model.path))
    on_phase("importing the engine")
    from glm52_engine.runtime.engine import LocalEngine
    from glm52_engine.runtime.record import EngineStopped

    engine: Engine = LocalEngine.load(
        Path(config.model.path),
        config.role(role),
        max_model_len=config.model.max_model_len,
        kv_cache_dtype=config.model.kv_cache_dtype,
        block_size=config.block_size,
        on_phase=on_phase,
        accelerator=config.accelerator,
    )
    engine.start()
    return engine, tokenizer, EngineStopped
