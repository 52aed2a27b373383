"""The router's process from its first moment to its exit code. Imports nothing of torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from aiohttp.connector import AddrInfoType

from glm52_engine.config import ConfigError, EngineConfig, Outcome, Role, read_engine_config
from glm52_engine.lifecycle import logs, trace
from glm52_engine.lifecycle.life import Life
from glm52_engine.lifecycle.start import InternalToken, bind, install_signals, notice_dead_peers, read_token, take
from glm52_engine.lifecycle.termination import last_line, leave
from glm52_engine.route.app import Router
from glm52_engine.route.discover import check_static, discover
from glm52_engine.route.frozen import Frozen
from glm52_engine.route.legs import Legs
from glm52_engine.route.pools import Pools
from glm52_engine.sizing import PROPAGATION_SECONDS

log = logging.getLogger(__name__)

ROLE = "router"
IDLE_SECONDS = 30.0
"""Shorter than the engine pods keep idle connections: the router is the one that closes them."""

LAST_WORDS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RouterOptions:
    config: str
    token_file: str
    host: str
    port: int
    prefill_urls: Sequence[str] = ()
    decode_urls: Sequence[str] = ()
    wait_seconds: float = 10.0
    propagation: float = PROPAGATION_SECONDS
    listen_fd: int | None = None


def route(options: RouterOptions) -> int:
    """Runs until TERM or a failure; returns the exit code after the termination message is written."""
    logs.setup(ROLE)
    trace.setup(ROLE)
    try:
        config = read_engine_config(options.config)
        token = read_token(options.token_file)
        if not (options.prefill_urls and options.decode_urls) and config.discovery is None:
            raise ConfigError(f"{options.config}: discovery: missing; or give --prefill-url and --decode-url")
        listener = take(options.listen_fd) if options.listen_fd is not None else bind(options.host, options.port)
    except ConfigError as error:
        return leave(Outcome.CONFIG_REFUSED, ROLE, str(error))
    try:
        return asyncio.run(run_router(options, config, token, listener))
    except Exception as error:
        log.error("the process failed", exc_info=error)
        return leave(Outcome.CRASHED, ROLE, last_line(error))


async def run_router(
    options: RouterOptions, config: EngineConfig, token: InternalToken, listener: socket.socket
) -> int:
    life = Life(window=config.drain.window_seconds, propagation=options.propagation)
    ended: asyncio.Future[tuple[Outcome, str]] = asyncio.get_running_loop().create_future()
    terminated = asyncio.Event()

    def on_term(name: str) -> None:
        life.drain(name)
        terminated.set()

    install_signals(on_term)
    pools = Pools()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_socket)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, read_bufsize=1 << 20) as session:
        frozen = Frozen(session, pools)
        legs = Legs(session, pools, token.sent, frozen)
        router = Router(
            model=config.model.name,
            max_model_len=config.model.max_model_len,
            token=token,
            life=life,
            pools=pools,
            legs=legs,
            wait_seconds=options.wait_seconds,
        )
        frozen.on_cut = lambda url, calls: router.metrics.frozen.inc(calls)
        runner = web.AppRunner(
            router.app(), handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_SECONDS
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=1024).start()
        log.info("listening", extra={"port": listener.getsockname()[1]})
        life.enter("listing the pods")
        tasks = [
            asyncio.create_task(_discovery(options, config, session, pools, life, ended)),
            asyncio.create_task(_drained(life, terminated, config.drain.window_seconds, ended)),
            asyncio.create_task(_watched(frozen, ended)),
        ]
        try:
            outcome, message = await ended
        finally:
            for task in tasks:
                task.cancel()
            cut_off = life.requests
            life.stop()
            await runner.cleanup()
            await legs.settle()
            await asyncio.to_thread(trace.flush)
    return leave(outcome, ROLE, message, in_flight=cut_off)


def _socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    notice_dead_peers(made)
    return made


async def _discovery(
    options: RouterOptions,
    config: EngineConfig,
    session: aiohttp.ClientSession,
    pools: Pools,
    life: Life,
    ended: asyncio.Future[tuple[Outcome, str]],
) -> None:
    try:
        if options.prefill_urls and options.decode_urls:
            urls: dict[Role, Sequence[str]] = {"prefill": options.prefill_urls, "decode": options.decode_urls}
            life.ready()
            await check_static(session, urls, pools)
        elif config.discovery is not None:
            await discover(config.discovery, pools, life.ready)
    except ConfigError as error:
        _end(ended, Outcome.CONFIG_REFUSED, str(error))
    except Exception as error:
        log.error("discovery ended", exc_info=error)
        _end(ended, Outcome.CRASHED, last_line(error))


async def _watched(frozen: Frozen, ended: asyncio.Future[tuple[Outcome, str]]) -> None:
    try:
        await frozen.watch()
    except Exception as error:
        log.error("the watch over frozen pods ended", exc_info=error)
        _end(ended, Outcome.CRASHED, last_line(error))


async def _drained(
    life: Life, terminated: asyncio.Event, window: int, ended: asyncio.Future[tuple[Outcome, str]]
) -> None:
    await terminated.wait()
    if await life.until_drained():
        _end(ended, Outcome.DRAINED, "drained: nothing was in flight")
    else:
        _end(ended, Outcome.DRAIN_TIMED_OUT, f"{life.in_flight} in flight after the window of {window} s")


def _end(ended: asyncio.Future[tuple[Outcome, str]], outcome: Outcome, message: str) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):
        ended.set_result((outcome, message))
