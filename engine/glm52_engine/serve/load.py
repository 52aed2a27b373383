"""Everything slow of an engine pod's start; runs on a thread while the HTTP server already answers its probes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glm52_engine.config import ConfigError, EngineConfig, Role, StoreConfig
from glm52_engine.lifecycle.phases import Phases
from glm52_engine.runtime.types import Engine
from glm52_engine.tokenizer import Tokenizer
from glm52_engine.transfer.agent import KvAgent
from glm52_engine.transfer.lanes import Lanes

if TYPE_CHECKING:
    from glm52_engine.offload.store import PrefixStore
    from glm52_engine.runtime.engine import LocalEngine


def load_engine(
    config: EngineConfig,
    role: Role,
    on_phase: Callable[[str], None],
    *,
    rank_hosts: Sequence[str] = (),
    token_file: str = "",
    phases: Phases | None = None,
    say: Callable[[str], None] = lambda text: None,
    on_leaving: Callable[[str], None] = lambda why: None,
    on_waiting: Callable[[str], None] = lambda text: None,
) -> tuple[Engine, Tokenizer, type[Exception]]:
    """The engine, its tokenizer, and what its calls raise when it stops. Raises ConfigError for what can never work.

    `on_phase` is told of phases that follow each other, and may raise to give the start up. Ranks that step together,
    those of several hosts and several on GPUs, have phases that overlap: they go to `phases`, and `say` gets how far
    they are. `rank_hosts`: HOST:PORT of the replica's other pods, which share the secret of `token_file`; `on_leaving`
    is told when one of them was asked to end, `on_waiting` for which of them the start waits, and "" once they are
    there.
    """
    on_phase("reading the tokenizer")
    tokenizer = Tokenizer.load(Path(config.model.path))
    on_phase("importing the engine")
    from glm52_engine.runtime.load import Options, load_engine
    from glm52_engine.runtime.record import EngineStopped

    own = config.role(role)
    if rank_hosts and own.store is not None:
        raise ConfigError("store: a replica of several hosts cannot take part in it so far; leave it out")
    local: LocalEngine
    # A GPU has no room for the experts of all: ranks of one pod share them as those of several do.
    if rank_hosts or (config.accelerator != "cpu" and own.ranks_per_host > 1):
        from glm52_engine.ranks.replica import load_replica
        from glm52_engine.ranks.spans import RankHost

        hosts = [RankHost.parse(text, own.ranks_per_host) for text in rank_hosts]
        phases = phases or Phases()
        phases.finish()
        local = load_replica(
            config,
            role,
            hosts,
            token_file=token_file,
            phases=phases,
            say=say,
            on_leaving=on_leaving,
            on_waiting=on_waiting,
        )
    else:
        local = load_engine(Path(config.model.path), Options.of(config, role), on_phase=on_phase)
    if own.store is not None:
        local.use_store(_started(own.store, local))
    local.start()
    return local, tokenizer, EngineStopped


def _started(config: StoreConfig, engine: LocalEngine) -> PrefixStore:
    from glm52_engine.offload.store import PrefixStore

    pool = engine.pools[0]
    store = PrefixStore(
        config,
        engine.layout,
        block_bytes=pool.block_bytes,
        pool_blocks=pool.num_blocks,
        host=os.environ.get("POD_IP") or "127.0.0.1",
    )
    store.start()
    return store


def is_consequence(error: BaseException) -> bool:
    """Whether the cause of an engine's failure lies with another pod, and is told there."""
    from glm52_engine.ranks import remote

    return remote.is_consequence(error)


def agent_for(engine: Engine, own: Lanes, on_notice: Callable[[bytes], None]) -> KvAgent:
    """The agents of all ranks: `own` where they are all in this pod."""
    from glm52_engine.ranks.replica import ReplicaEngine

    return engine.agent(own, on_notice) if isinstance(engine, ReplicaEngine) else own
