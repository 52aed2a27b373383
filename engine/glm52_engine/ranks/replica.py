"""A replica of several hosts as its leader sees it: made from the configuration, used rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from glm52_engine.config import EngineConfig, Role
from glm52_engine.lifecycle.start import read_token
from glm52_engine.ranks.coordinator import Coordinator, Plan
from glm52_engine.ranks.load import load_host, read_terms
from glm52_engine.ranks.phases import Phases
from glm52_engine.ranks.spans import RankHost
from glm52_engine.runtime.rank import Event
from glm52_engine.sizing import startup_budget_seconds


def make_replica(
    config: EngineConfig,
    role: Role,
    hosts: Sequence[RankHost],
    *,
    token_file: str | Path,
    say: Callable[[str], None],
    post: Callable[[list[Event]], None],
    debug: bool = False,
    launch_ahead: bool | None = None,
) -> Coordinator:
    """Blocking: reads the checkpoint's headers; `Coordinator.bring_up` then does the rest. Raises ConfigError.

    `launch_ahead` None: as the configuration has it, but never on a CPU, where nothing runs beside the host.
    """
    phases = Phases(lambda phase: say(f"{phase.name}: {phase.ended - phase.began:.1f} s"))
    phases.note("starting the process", 0.0)
    own = config.role(role)
    measures, terms = read_terms(config, role, (own.ranks_per_host, *(host.ranks for host in hosts)), phases)
    plan = Plan(
        hosts=hosts,
        terms=terms,
        secret=read_token(str(token_file)).sent,
        load=lambda: load_host(config, role, measures, plan.local, terms.world, phases, say),
        connect_seconds=startup_budget_seconds(
            own, weights_gib=config.model.weights_gib, accelerator=config.accelerator
        ),
        launch_ahead=(own.launch_ahead and config.accelerator != "cpu") if launch_ahead is None else launch_ahead,
        debug=debug,
    )
    return Coordinator(plan, phases, post)
