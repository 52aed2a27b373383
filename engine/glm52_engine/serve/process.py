"""An engine pod's process from its first moment to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvicorn
from starlette.types import ASGIApp

from glm52_engine.config import ConfigError, EngineConfig, KvTransferConfig, Outcome, Role, read_engine_config
from glm52_engine.hardware.health import Verdict
from glm52_engine.hardware.nvml import watch_gpus
from glm52_engine.lifecycle import logs, trace
from glm52_engine.lifecycle.hold import given_hold, wait_for_turn
from glm52_engine.lifecycle.leftovers import is_first_process, sweep
from glm52_engine.lifecycle.life import Life
from glm52_engine.lifecycle.phases import Phases
from glm52_engine.lifecycle.start import InternalToken, bind, install_signals, read_token, take
from glm52_engine.lifecycle.states import STUCK_AFTER_SECONDS
from glm52_engine.lifecycle.termination import host_name, last_line, leave, stack_of, tell_native_end
from glm52_engine.lifecycle.threads import in_thread
from glm52_engine.serve.app import make_app
from glm52_engine.serve.load import agent_for, is_consequence, load_engine
from glm52_engine.serve.metrics import Metrics
from glm52_engine.serve.pod import Loaded, Pod
from glm52_engine.sizing import PROPAGATION_SECONDS, startup_budget_seconds, unpin_seconds
from glm52_engine.structured import GrammarCompiler
from glm52_engine.transfer.devices import chosen_devices
from glm52_engine.transfer.early import EarlyPulls
from glm52_engine.transfer.fingerprint import fingerprint
from glm52_engine.transfer.hold import Holder, TransferCounters
from glm52_engine.transfer.lanes import Lanes, chosen_lanes
from glm52_engine.transfer.peers import Puller

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
WHOLE_START = "everything"
"""Name of the phase from the process's first moment until it is ready."""
LAST_WORDS_SECONDS = 2.0
"""For handlers to tell their clients that the request was cut off."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    role: Role
    config: str
    token_file: str
    host: str
    port: int
    propagation: float = PROPAGATION_SECONDS
    listen_fd: int | None = None
    rank_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """Why the process leaves; `rank`: the one that failed, where one did; `consequence`: as another host of the replica
    does, or shall."""

    outcome: Outcome
    message: str
    rank: int | None = None
    consequence: bool = False


def serve(options: ServeOptions) -> int:
    """Runs until TERM or a failure; returns the exit code after the termination message is written."""
    tell_native_end()
    logs.setup(options.role)
    trace.setup(options.role)
    if is_first_process():
        sweep()
    try:
        config = read_engine_config(options.config)
        token = read_token(options.token_file)
        listener = take(options.listen_fd) if options.listen_fd is not None else bind(options.host, options.port)
    except ConfigError as error:
        return leave(Outcome.CONFIG_REFUSED, options.role, str(error))
    try:
        return asyncio.run(Process(options, config, token, listener).run())
    except Exception as error:
        log.error("the process failed", exc_info=error)
        return leave(Outcome.CRASHED, options.role, last_line(error))


class GivenUp(Exception):
    """A TERM came during the start; the message is the phase that was not begun."""


class Process:
    def __init__(
        self, options: ServeOptions, config: EngineConfig, token: InternalToken, listener: socket.socket
    ) -> None:
        self.options = options
        self.config = config
        self._listener = listener
        self._ended: asyncio.Future[End]
        self._terminated = asyncio.Event()
        self._start_limit: asyncio.Timeout
        self._leaving_with = ""
        """Why the replica is drained though nobody has told this pod to go."""
        self._tasks: list[asyncio.Task[None]] = []
        self._loading: asyncio.Future[Any] | None = None
        ip = os.environ.get("POD_IP") or "127.0.0.1"
        port = listener.getsockname()[1]
        counters = TransferCounters()
        phases = Phases(lambda phase: log.info("%s: %.1f s", phase.name, phase.ended - phase.began))
        self.life = Life(
            window=config.drain.window_seconds,
            propagation=options.propagation,
            held=lambda: len(self.pod.loaded.holder) if self.pod.loaded else 0,
        )
        self.pod = Pod(
            config=config,
            role=options.role,
            host=host_name(),
            address=f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}",
            token=token,
            life=self.life,
            phases=phases,
            counters=counters,
            metrics=Metrics(
                config.model.name,
                lambda: self.pod.loaded.engine.stats() if self.pod.loaded else None,
                counters,
                lambda: self.life.held(),
                lambda: self.pod.start_phases(),
            ),
        )

    async def run(self) -> int:
        self._ended = asyncio.get_running_loop().create_future()
        install_signals(self.terminate)
        self.pod.phases.note("starting the process", 0.0)
        server = QuietServer(make_app(self.pod))
        http = asyncio.create_task(server.serve(sockets=[self._listener]))
        log.info("listening", extra={"address": self.pod.address})
        for work in (self._load(), self._drained(), self._watch()):
            self._spawn(work)
        http.add_done_callback(lambda task: self._end(Outcome.CRASHED, "the HTTP server ended"))
        try:
            return await self._leave(await self._ended, server, http)
        finally:
            for task in self._tasks:
                task.cancel()

    def terminate(self, name: str) -> None:
        """What TERM does: a second one changes nothing."""
        self.life.drain(name)
        self._terminated.set()

    def leave_with(self, why: str) -> None:
        """A rank host was asked to end: without it no step is possible, so all of the replica goes as after a TERM."""
        log.info("the replica has to go", extra={"reason": why})
        if not self._terminated.is_set():
            self._leaving_with = why
        self.terminate(why)

    def _end(self, outcome: Outcome, message: str, rank: int | None = None, *, consequence: bool = False) -> None:
        """The first cause is the one that is reported."""
        if not self._ended.done():
            self._ended.set_result(End(outcome, message, rank, consequence))

    def _follows(self, error: BaseException) -> bool:
        """Whether the cause lies with another host of the replica."""
        return bool(self.options.rank_hosts) and is_consequence(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task without which the process would be half alive: it ends the process when it breaks."""

        def over(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.error("a part of the process failed", exc_info=error)
                self._end(Outcome.CRASHED, last_line(error))

        task = asyncio.create_task(work)
        task.add_done_callback(over)
        self._tasks.append(task)

    async def _load(self) -> None:
        try:
            held = await wait_for_turn(lambda phase: self.life.enter(phase, held=True), given_hold())
            # The startup probe has passed while we waited, so that nobody else limits this start.
            async with asyncio.timeout(self._start_budget() if held else None) as self._start_limit:
                self.pod.loaded = await self._loaded()
            self.pod.phases.finish()
            self.pod.phases.note(WHOLE_START, 0.0)
            self.life.ready()
            log.info("ready")
        except ConfigError as error:
            self._end(Outcome.CONFIG_REFUSED, str(error))
        except TimeoutError:
            phase = self.life.state.phase
            self._end(Outcome.CRASHED, f"the start took more than {self._start_budget()} s; last: {phase}")
        except GivenUp as error:
            log.info("the start was given up", extra={"phase": str(error)})
        except Exception as error:
            log.error("the start failed", exc_info=error)
            self._end(Outcome.CRASHED, last_line(error), getattr(error, "rank", None), consequence=self._follows(error))

    def _waits(self, text: str) -> None:
        """For other hosts of the replica, which is nothing that starting anew would help: the startup probe passes, and
        once they are there this process limits the rest of its start itself."""
        if text:
            self.life.enter(text, held=True)
            self._start_limit.reschedule(None)
        elif self.life.state.held:
            self.life.enter("joining")
            self._start_limit.reschedule(asyncio.get_running_loop().time() + self._start_budget())

    def _start_budget(self) -> int:
        role = self.config.role(self.options.role)
        return startup_budget_seconds(
            role, weights_gib=self.config.model.weights_gib, accelerator=self.config.accelerator
        )

    async def _loaded(self) -> Loaded:
        loop = asyncio.get_running_loop()

        def say(text: str) -> None:
            if self._terminated.is_set():
                raise GivenUp(text)
            loop.call_soon_threadsafe(self.life.enter, text)

        def on_phase(phase: str) -> None:
            say(phase)
            # Behind the colon stands how far it is.
            self.pod.phases.enter(phase.partition(":")[0])

        def on_leaving(why: str) -> None:
            loop.call_soon_threadsafe(self.leave_with, why)

        def on_waiting(text: str) -> None:
            loop.call_soon_threadsafe(self._waits, text)

        crossing = self.config.kv_transfer or KvTransferConfig()
        devices = chosen_devices(crossing.net_devices)
        options = self.options
        self._loading = in_thread(
            lambda: load_engine(
                self.config,
                options.role,
                on_phase,
                rank_hosts=options.rank_hosts,
                token_file=options.token_file,
                phases=self.pod.phases,
                say=say,
                on_leaving=on_leaving,
                on_waiting=on_waiting,
            )
        )
        engine, tokenizer, stopped = await self._loading
        if self.config.accelerator == "nvidia":
            await self._watch_gpus()
        on_phase("reading the vocabulary for grammars")
        grammars = await in_thread(lambda: GrammarCompiler(tokenizer))
        holder = Holder(engine, self.pod.counters, on_change=self.life.poke)
        name = f"{self.pod.host}/{secrets.token_hex(8)}"
        own = Lanes(
            name,
            engine.pools,
            on_notice=holder.notice_from_agent,
            expects=holder.expects,
            devices=devices,
            count=chosen_lanes(devices),
        )
        agent = agent_for(engine, own, holder.notice_from_agent)
        on_phase("registering the KV pools for transfer")
        await in_thread(agent.start)
        print_of = fingerprint(engine)
        puller = Puller(
            agent,
            print_of,
            aiohttp.ClientSession(),
            self.pod.counters,
            self.pod.token.sent,
            checksums=crossing.checksums,
        )
        self._spawn(holder.expire_forever())
        early = EarlyPulls(engine, puller)
        return Loaded(engine, tokenizer, grammars, agent, holder, puller, early, print_of, stopped)

    async def _drained(self) -> None:
        # The preStop hook drains and TERM comes after it: only TERM ends the process.
        await self._terminated.wait()
        if await self.life.until_drained():
            outcome, words = Outcome.DRAINED, "drained: nothing was in flight"
        else:
            outcome = Outcome.DRAIN_TIMED_OUT
            words = f"{self.life.in_flight} in flight after the window of {self.config.drain.window_seconds} s"
        why = f"; {self._leaving_with}" if self._leaving_with else ""
        self._end(outcome, words + why, consequence=bool(why))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self.pod.loaded is None:
                continue
            engine, agent = self.pod.loaded.engine, self.pod.loaded.agent
            failure = engine.failure()
            if failure is not None:
                self._crashed(f"rank {engine.suspect()} failed: {last_line(failure)}", failure, engine.suspect())
            elif agent.failure is not None:
                self._crashed(f"the KV transfer failed: {last_line(agent.failure)}", agent.failure)
            stuck = engine.seconds_without_progress()
            if stuck > STUCK_AFTER_SECONDS:
                rank = engine.suspect()
                log.error("rank %d hangs in %s", rank, stack_of(f"rank-{rank}"))
                words = f"rank {rank}: work is queued and no step has finished for {stuck:.0f} s"
                self._end(Outcome.WEDGED, words, rank)
                return

    async def _watch_gpus(self) -> None:
        loop = asyncio.get_running_loop()
        ranks = self.config.role(self.options.role).ranks_per_host

        def judged(verdict: Verdict) -> None:
            loop.call_soon_threadsafe(self._judged, verdict)

        await in_thread(lambda: watch_gpus(ranks, judged))

    def _judged(self, verdict: Verdict) -> None:
        """A GPU that can no longer be trusted ends the process by its name: its next answer may be wrong."""
        if verdict.fatal:
            log.error("a GPU failed: %s", verdict.text)
            self._end(Outcome.CRASHED, verdict.text, verdict.rank)
        else:
            log.warning("a GPU is not well: %s", verdict.text)

    def _crashed(self, message: str, error: BaseException, rank: int | None = None) -> None:
        if not self.pod.failure:
            log.error("crashed", exc_info=error, extra={"rank": rank})
        self.pod.failure = message
        self._end(Outcome.CRASHED, message, rank, consequence=self._follows(error))

    async def _leave(self, end: End, server: uvicorn.Server, http: asyncio.Task[None]) -> int:
        cut_off = self.life.in_flight
        self.life.stop()
        if self.pod.loaded is not None:
            await self._close(self.pod.loaded)
        elif self._loading is not None and self.config.accelerator == "nvidia":
            # It lets go of pools that are pinned: left to the end of the process the kernel would, deaf to signals.
            await asyncio.wait({self._loading}, timeout=unpin_seconds(self.config.role(self.options.role)))
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(http), LAST_WORDS_SECONDS)
        await asyncio.to_thread(trace.flush)
        return leave(
            end.outcome,
            self.options.role,
            end.message,
            in_flight=cut_off,
            rank=end.rank,
            consequence=end.consequence,
        )

    async def _close(self, parts: Loaded) -> None:
        """Transfers end before the pools go: a peer must never read memory that is no longer ours."""
        parts.early.close()
        await parts.puller.settle()
        limit = unpin_seconds(self.config.role(self.options.role)) + 5.0
        for name, close in (("transfers", parts.agent.close), ("engine", parts.engine.stop)):
            try:
                await asyncio.wait_for(in_thread(close), limit)
            except TimeoutError:
                log.error("did not close in time", extra={"closing": name, "limit": limit})
            except Exception as error:
                log.error("did not close", exc_info=error, extra={"closing": name})
        await self.life.until_idle(LAST_WORDS_SECONDS)
        await parts.puller.session.close()


class QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers: TERM is ours to handle."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                # Longer than the router keeps an idle connection, so that the router is the one to close it.
                timeout_keep_alive=90,
                timeout_graceful_shutdown=1,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
