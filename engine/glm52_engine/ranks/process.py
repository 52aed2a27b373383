"""A rank host's process, `glm52-engine rank-host`, from its first moment to its exit code.

Everything slow of the start overlaps: the door opens at once, weights and pools load beside each other, and a leader
may shake hands before either is there.

A leader that is lost before the ranks have joined costs nothing: the weights stay, and the next one is waited for.
Afterwards the process ends. Communicators of a broken group cannot be used again, kernels of a step may still run on
the blocks, and memory of a device is let go for certain only with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass

from glm52_engine.config import ConfigError, EngineConfig, KvTransferConfig, Outcome, Role, read_engine_config
from glm52_engine.hardware.health import Verdict
from glm52_engine.hardware.nvml import watch_gpus
from glm52_engine.lifecycle import logs
from glm52_engine.lifecycle.hold import given_hold, wait_for_turn
from glm52_engine.lifecycle.leftovers import is_first_process, sweep
from glm52_engine.lifecycle.phases import Phase, Phases
from glm52_engine.lifecycle.start import InternalToken, bind, install_signals, read_token, take
from glm52_engine.lifecycle.termination import last_line, leave, tell_native_end
from glm52_engine.lifecycle.threads import in_thread
from glm52_engine.ranks.crew import Crew, RankFailed
from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.ranks.health import probes
from glm52_engine.ranks.host import Ended, Ready, Session
from glm52_engine.ranks.kv import HostAgent
from glm52_engine.ranks.link import LinkLost
from glm52_engine.ranks.load import load_host, read_terms
from glm52_engine.ranks.reception import Reception
from glm52_engine.ranks.spans import RankSpan
from glm52_engine.sizing import unpin_seconds
from glm52_engine.transfer.devices import chosen_devices

log = logging.getLogger(__name__)

LINGER_SECONDS = 5.0
"""How long a host that cannot start stays to tell its leader why: a closed port says nothing."""


@dataclass(frozen=True, slots=True)
class RankHostOptions:
    """`hosts`: of the replica, the leader included; `index`: which of them this one is, the leader being 0.

    `probe_port`: where the kubelet asks how it is; None where there is none.
    """

    role: Role
    config: str
    token_file: str
    host: str
    port: int
    hosts: int
    index: int
    listen_fd: int | None = None
    probe_port: int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Why the process leaves; `consequence`: since another host of the replica does."""

    outcome: Outcome
    message: str
    rank: int | None = None
    consequence: bool = False


def rank_host(options: RankHostOptions) -> int:
    """Runs until TERM, the leader's end or a failure; the exit code, after the termination message is written."""
    tell_native_end()
    logs.setup(f"{options.role} rank host")
    if is_first_process():
        sweep()
    try:
        config = read_engine_config(options.config)
        token = read_token(options.token_file)
        if not 1 <= options.index < options.hosts:
            raise ConfigError(
                f"--host-index: found {options.index}; expected 1 to {options.hosts - 1} of --hosts {options.hosts} "
                "(0 is the leader, which runs `serve`)"
            )
        listener = take(options.listen_fd) if options.listen_fd is not None else bind(options.host, options.port)
    except ConfigError as error:
        return leave(Outcome.CONFIG_REFUSED, options.role, str(error))
    try:
        end = asyncio.run(HostProcess(options, config, token, listener).run())
    except Exception as error:
        log.error("the rank host failed", exc_info=error)
        end = End(Outcome.CRASHED, last_line(error))
    return leave(end.outcome, options.role, end.message, rank=end.rank, consequence=end.consequence)


class GpuFailed(Exception):
    """A GPU of this host can no longer be trusted; the text is the verdict's."""


class HostProcess:
    def __init__(
        self, options: RankHostOptions, config: EngineConfig, token: InternalToken, listener: socket.socket
    ) -> None:
        self.options, self.config, self._token, self._listener = options, config, token, listener
        ranks = config.role(options.role).ranks_per_host
        self._counts = (ranks,) * options.hosts
        self._span = RankSpan("this host", ranks * options.index, ranks)
        self._terminated = asyncio.Event()
        self._session: Session | None = None
        self._crew: Crew | None = None
        self._verdict: Verdict | None = None
        self._judged_ill = asyncio.Event()
        self._held = False

    async def run(self) -> End:
        loop = asyncio.get_running_loop()
        install_signals(self._on_term)

        def told(phase: Phase) -> None:
            loop.call_soon_threadsafe(self._on_phase, phase)

        phases = Phases(told)
        phases.note("starting the process", 0.0)
        reception = Reception(self._span, self._token)
        await reception.open(self._listener)
        log.info("listening for the leader", extra={"port": self._listener.getsockname()[1]})
        loading = asyncio.create_task(self._load(reception, phases))
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(reception.close)
            if self.options.probe_port is not None:
                await stack.enter_async_context(
                    probes(
                        self.options.host,
                        self.options.probe_port,
                        started=lambda: loading.done() or self._held,
                        ready=self._is_joined,
                        phases=lambda: phases.done,
                    )
                )
            end = await self._serve(reception, loading, phases)
            await self._let_go(loading)
            return end

    def _on_hold(self, phase: str) -> None:
        # The budget of the startup probe is for starting.
        self._held = True
        log.info("starting", extra={"phase": phase})

    def _is_joined(self) -> bool:
        return self._session is not None and self._session.joined

    async def _serve(self, reception: Reception, loading: asyncio.Task[Ready], phases: Phases) -> End:
        term = asyncio.create_task(self._terminated.wait())
        ill = asyncio.create_task(self._illness())
        while True:
            leader = asyncio.create_task(reception.leader())
            failed = asyncio.create_task(_failure(loading))
            await asyncio.wait({leader, term, failed, ill}, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            if leader.done():
                world = sum(self._counts)
                session = Session(leader.result(), loading, self._span, world, phases, self._terminated, ill)
                end = await self._with_leader(session)
                if end is not None:
                    return end
                await reception.part()
                continue
            leader.cancel()
            if term.done():
                return End(Outcome.DRAINED, "asked to end while no leader was here")
            if ill.done():
                error = ill.exception()
                return End(Outcome.CRASHED, str(error), getattr(error, "rank", None))
            return await self._refused(reception, loading, term)

    async def _with_leader(self, session: Session) -> End | None:
        """None where the next leader may come."""
        self._session = session
        try:
            await session.run()
        except Ended as end:
            if end.crashed:
                return End(Outcome.CRASHED, f"the replica failed: {end}", consequence=True)
            return End(Outcome.DRAINED, f"ended by the leader: {end}", consequence=not self._terminated.is_set())
        except (LinkLost, ProtocolError) as error:
            log.warning("leader lost", extra={"reason": str(error), "joined": session.joined})
            if self._terminated.is_set():
                return End(Outcome.DRAINED, f"asked to end, and {error}")
            if not session.joined:
                return None
            return End(Outcome.CRASHED, str(error), consequence=isinstance(error, LinkLost))
        except ConfigError as error:
            return End(Outcome.CONFIG_REFUSED, str(error))
        except RankFailed as error:
            log.error("a rank failed", exc_info=error)
            return End(Outcome.CRASHED, str(error), error.rank, error.consequence)
        except Exception as error:
            log.error("the session failed", exc_info=error)
            return End(Outcome.CRASHED, last_line(error))
        finally:
            self._session, self._crew = None, session.crew

    async def _refused(self, reception: Reception, loading: asyncio.Task[Ready], term: asyncio.Task[bool]) -> End:
        """The load failed before a leader came: the next one is told why, within LINGER_SECONDS."""
        error = loading.exception()
        assert error is not None
        words = str(error) if isinstance(error, ConfigError) else last_line(error)
        log.error("the load failed", exc_info=error)
        reception.refuse(words)
        await asyncio.wait({term}, timeout=LINGER_SECONDS)
        return End(Outcome.CONFIG_REFUSED if isinstance(error, ConfigError) else Outcome.CRASHED, words)

    async def _load(self, reception: Reception, phases: Phases) -> Ready:
        role, hosts = self.options.role, self._counts
        # Its leader waits as long: to load for it now would be for nothing.
        await wait_for_turn(self._on_hold, given_hold())
        try:
            devices = chosen_devices((self.config.kv_transfer or KvTransferConfig()).net_devices)
            measures, terms = await in_thread(lambda: read_terms(self.config, role, hosts, phases))
            reception.terms.set_result(terms)
            parts = await in_thread(
                lambda: load_host(self.config, role, measures, self._span, sum(hosts), phases, log.info)
            )
            agent = HostAgent(parts.pools, self._span, devices)
            with phases.phase("registering the KV pools for transfer"):
                await in_thread(agent.start)
            if self.config.accelerator == "nvidia":
                await self._watch_gpus()
            return Ready(parts, agent)
        except Exception as error:
            if not reception.terms.done():
                reception.refuse(str(error))
            raise

    async def _watch_gpus(self) -> None:
        loop, span = asyncio.get_running_loop(), self._span

        def told(verdict: Verdict) -> None:
            loop.call_soon_threadsafe(self._judged, verdict)

        await in_thread(lambda: watch_gpus(span.rank_count, told, first_rank=span.first_rank))

    def _judged(self, verdict: Verdict) -> None:
        if not verdict.fatal:
            log.warning("a GPU is not well: %s", verdict.text)
        elif self._verdict is None:
            log.error("a GPU failed: %s", verdict.text)
            self._verdict = verdict
            self._judged_ill.set()

    async def _illness(self) -> None:
        """Ends by raising, when a GPU of this host can no longer be trusted: its next answer may be wrong."""
        await self._judged_ill.wait()
        assert self._verdict is not None
        raise RankFailed(self._verdict.rank, GpuFailed(self._verdict.text))

    async def _let_go(self, loading: asyncio.Task[Ready]) -> None:
        """Unpins the pools, which the kernel would do for a process that ends, deaf to every signal."""
        if self.config.accelerator == "cpu" or not loading.done() or loading.exception() is not None:
            return
        ready, crew = loading.result(), self._crew
        limit = unpin_seconds(self.config.role(self.options.role)) + 5.0

        def close() -> None:
            ready.agent.close()  # first: a peer must never read memory that is no longer ours
            if crew is None or crew.wait(limit):
                ready.parts.close()

        try:
            await asyncio.wait_for(in_thread(close), limit)
        except Exception as error:
            log.error("did not close", extra={"reason": last_line(error)})

    def _on_term(self, name: str) -> None:
        """A leader is told, and drains: its requests need our ranks until it is done."""
        log.info("asked to end", extra={"by": name, "leader": self._session is not None})
        self._terminated.set()

    def _on_phase(self, phase: Phase) -> None:
        log.info("%s: %.1f s", phase.name, phase.ended - phase.began)
        if self._session is not None:
            self._session.poke()


async def _failure(loading: asyncio.Task[Ready]) -> None:
    """Returns when the load has failed; never when it has not."""
    await asyncio.wait({loading})
    if loading.exception() is None:
        await asyncio.Event().wait()
