"""The last words of a process, where the kubelet collects them."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import threading
import traceback
from pathlib import Path

from glm52_engine.config import EXIT_CODES, TERMINATION_LOG_PATH, Outcome, Termination
from glm52_engine.lifecycle.logs import last_lines

log = logging.getLogger(__name__)

TERMINATION_LOG_ENV = "TERMINATION_LOG"

STACK_CALLS = 5

CRASHES = frozenset({Outcome.CRASHED, Outcome.WEDGED})
"""Ends that nobody asked for and that a correct configuration does not cause."""


def host_name() -> str:
    return os.environ.get("POD_NAME") or socket.gethostname()


def last_line(error: BaseException) -> str:
    """An exception as one line: its type only where the text alone would say little."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def stack_of(thread: str) -> str:
    """Where a thread of this process is now, innermost call first: of one that hangs nothing else will ever tell."""
    number = next((each.ident for each in threading.enumerate() if each.name == thread), None)
    frame = sys._current_frames().get(number) if number is not None else None
    if frame is None:
        return f"no thread named {thread}"
    calls = reversed(traceback.extract_stack(frame)[-STACK_CALLS:])
    return " < ".join(f"{call.name} ({Path(call.filename).name}:{call.lineno})" for call in calls)


def tell_native_end() -> None:
    """A native abort leaves no message, and the kubelet takes the last 2 KB of the log: from now on Python writes into
    them where the thread was that fell. Among the stacks of all threads it would seldom be there."""
    faulthandler.enable(all_threads=False)


def leave(
    outcome: Outcome,
    role: str,
    message: str,
    *,
    in_flight: int = 0,
    rank: int | None = None,
    consequence: bool = False,
) -> int:
    """Writes the termination message and returns the exit code that goes with it.

    A crash leaves its evidence there as well: a marker, the rank, and the last log lines from before this call.
    """
    host, code, crashed = host_name(), EXIT_CODES[outcome], outcome in CRASHES
    words = Termination(
        outcome=outcome,
        role=role,
        host=host,
        message=message,
        in_flight=in_flight,
        marker=f"CRASH_{host}" if crashed else "",
        rank=rank,
        code=code,
        log=last_lines() if crashed else (),
        consequence=consequence,
    )
    level = logging.INFO if code == 0 else logging.ERROR
    extra: dict[str, object] = {"outcome": outcome.value, "exit_code": code, "cut_off": in_flight}
    extra |= {"marker": words.marker, "rank": rank} if crashed else {}
    log.log(level, "%s", message, extra=extra)
    path = os.environ.get(TERMINATION_LOG_ENV) or (TERMINATION_LOG_PATH if Path(TERMINATION_LOG_PATH).exists() else "")
    if path:
        try:
            Path(path).write_text(words.encode())
        except OSError as error:
            log.warning("cannot write the termination message", extra={"path": path, "reason": error.strerror})
    return code
