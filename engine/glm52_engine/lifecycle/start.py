"""What every server process does first: read its secret, take its port, catch its signals."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from glm52_engine.config import ConfigError


@dataclass(frozen=True, slots=True)
class InternalToken:
    """The deployment's secret: what is sent, and everything that is taken.

    While it is changed pods know different ones. A pod that takes the old and the new one understands them all.
    """

    taken: tuple[str, ...]

    @property
    def sent(self) -> str:
        return self.taken[0]

    def accepts(self, given: bytes) -> bool:
        # All are compared, so that the time it takes does not tell which one was nearly right.
        matches = [hmac.compare_digest(given, token.encode()) for token in self.taken]
        return any(matches)


def read_token(path: str) -> InternalToken:
    """One token a line; the first is sent."""
    try:
        with open(path) as file:
            taken = tuple(line.strip() for line in file.read().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"{path}: cannot be read ({reason}); expected the deployment's secret") from error
    if not taken:
        raise ConfigError(f"{path}: is empty; expected the deployment's secret")
    return InternalToken(taken)


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; port 0 lets the system choose."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A restart in place must not wait for the old connections' TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    notice_dead_peers(listener)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host}:{port} ({reason}); choose another --port") from error
    return listener


def notice_dead_peers(sock: socket.socket) -> None:
    """A node that vanishes sends no FIN: without this a stream to it would hold its seat for a quarter of an hour.

    Set on a listener, accepted connections inherit it (Linux).
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
    for name, value in wanted.items():
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def take(fd: int) -> socket.socket:
    """A socket that the parent process has bound: nobody else can take its port in between."""
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError(f"--listen-fd {fd}: is no socket ({error.strerror})") from error


def install_signals(on_term: Callable[[str], None]) -> None:
    """As PID 1 nothing is handled by default: TERM would be ignored, and orphans would stay zombies."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_term, number.name)
    if os.getpid() == 1:
        loop.add_signal_handler(signal.SIGCHLD, reap)


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
