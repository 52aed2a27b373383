"""A replica of several ranks that step together, behind the `Engine` protocol: what its leader serves with, whether
other ranks are on other hosts or all are its own.

Requests, seats and blocks of all ranks are the leader's, as in a pod of its own; only the computing is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from glm52_engine.config import EngineConfig, Role
from glm52_engine.lifecycle.phases import Phases
from glm52_engine.lifecycle.start import read_token
from glm52_engine.ranks.coordinator import Coordinator, Plan
from glm52_engine.ranks.kv import ReplicaAgent
from glm52_engine.ranks.load import load_host, read_terms
from glm52_engine.ranks.remote import ReplicaFailed
from glm52_engine.ranks.spans import RankHost
from glm52_engine.runtime.engine import LocalEngine
from glm52_engine.runtime.ledger import Ledger
from glm52_engine.runtime.rank import Counters, Event, Running
from glm52_engine.runtime.record import Record
from glm52_engine.runtime.types import KvPool
from glm52_engine.transfer.lanes import Lanes

Say = Callable[[str], None]


class SteppedRank:
    """One rank of the replica, wherever it is: implements `runtime.rank.AnyRank`."""

    def __init__(self, index: int, coordinator: Coordinator) -> None:
        self.index = index
        self._coordinator = coordinator

    @property
    def counters(self) -> Counters:
        return self._coordinator.books.counters[self.index]

    @property
    def failure(self) -> BaseException | None:
        """Of the replica, told by the rank that failed, or by the first where none is known."""
        failure = self._coordinator.failure
        rank = failure.rank if isinstance(failure, ReplicaFailed) else None
        return failure if (rank or 0) == self.index else None

    def warm_up(self) -> None:
        """Done when the replica came up: no rank can compute alone."""

    def start(self) -> None:
        """Its thread, here or elsewhere, has run since then."""

    def start_sequence(self, sequence: Running) -> None:
        self._coordinator.start(self.index, sequence)

    def abort(self, key: str) -> None:
        self._coordinator.abort(self.index, key)

    def seconds_without_progress(self) -> float:
        return self._coordinator.seconds_without_progress()

    def stop(self) -> None:
        self._coordinator.stop()


class ReplicaEngine(LocalEngine):
    """`LocalEngine` over the ranks of all hosts."""

    def __init__(self, coordinator: Coordinator, *, prefix_cache: bool) -> None:
        """After `Coordinator.bring_up`."""
        parts = coordinator.parts
        if parts is None:
            raise RuntimeError("the replica is not up yet")
        measures, world = parts.measures, coordinator.plan.terms.world
        super().__init__(
            (),
            limits=measures.limits,
            step=measures.step,
            layout=parts.layout,
            prefix_cache=prefix_cache,
            pool_seconds=parts.pool_seconds,
        )
        self.pools: Sequence[KvPool] = parts.pools
        """Those of the leader's own ranks: other hosts' are their own processes'."""
        self._ledger = Ledger(world, measures.limits)
        self._ranks = [SteppedRank(index, coordinator) for index in range(world)]
        self._coordinator = coordinator
        self._held = [0] * world
        self._executors = tuple(coordinator.executors)
        coordinator.on_events = self._post

    def agent(self, own: Lanes, on_notice: Callable[[bytes], None]) -> ReplicaAgent:
        """For all ranks, from the one that has the leader's own pools."""
        self._coordinator.on_notice = on_notice
        return ReplicaAgent(own, self._coordinator.agents, self._coordinator)

    def stop(self) -> None:
        self._coordinator.stop()
        super().stop()
        self._coordinator.close()

    def _ended(self, record: Record, event: Event) -> None:
        super()._ended(record, event)
        if record.prefill and record.state == "held":
            self._hold(record, 1)

    def _forget(self, record: Record) -> None:
        if record.prefill and record.state == "held":
            self._hold(record, -1)
        super()._forget(record)

    def _hold(self, record: Record, more: int) -> None:
        rank = record.blocks.rank
        self._held[rank] += more
        self._coordinator.hold(rank, self._held[rank] > 0)


def make_coordinator(
    config: EngineConfig,
    role: Role,
    hosts: Sequence[RankHost],
    *,
    token_file: str | Path,
    phases: Phases,
    say: Say,
    debug: bool = False,
    launch_ahead: bool | None = None,
) -> Coordinator:
    """Blocking: reads the checkpoint's headers; `Coordinator.bring_up` then does the rest. Raises ConfigError.

    `launch_ahead` None: as the configuration has it, but never on a CPU, where nothing runs beside the host.
    """
    own = config.role(role)
    measures, terms = read_terms(config, role, (own.ranks_per_host, *(host.ranks for host in hosts)), phases)
    plan = Plan(
        hosts=hosts,
        terms=terms,
        secret=read_token(str(token_file)).sent,
        load=lambda: load_host(config, role, measures, plan.local, terms.world, phases, say),
        launch_ahead=(own.launch_ahead and config.accelerator != "cpu") if launch_ahead is None else launch_ahead,
        debug=debug,
    )
    return Coordinator(plan, phases)


def load_replica(
    config: EngineConfig,
    role: Role,
    hosts: Sequence[RankHost],
    *,
    token_file: str,
    phases: Phases,
    say: Say,
    on_leaving: Callable[[str], None],
    on_waiting: Callable[[str], None],
) -> ReplicaEngine:
    """Blocking: until every rank of every host has computed its first steps. Raises ConfigError and ReplicaFailed.

    Both are called on another thread. `on_leaving`, from the start on: a host was asked to end, so the replica has to
    be drained. `on_waiting`: for which hosts the start waits, and "" once they are there.
    """
    coordinator = make_coordinator(config, role, hosts, token_file=token_file, phases=phases, say=say)
    coordinator.on_leaving, coordinator.on_waiting = on_leaving, on_waiting
    try:
        coordinator.bring_up()
    except BaseException:
        coordinator.stop()
        coordinator.close()
        raise
    return ReplicaEngine(coordinator, prefix_cache=config.role(role).prefix_cache)
