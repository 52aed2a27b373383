"""The last words of a process, where the kubelet collects them."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from glm52_engine.config import EXIT_CODES, TERMINATION_LOG_PATH, Outcome, Termination

log = logging.getLogger(__name__)

TERMINATION_LOG_ENV = "TERMINATION_LOG"


def host_name() -> str:
    return os.environ.get("POD_NAME") or socket.gethostname()


def last_line(error: BaseException) -> str:
    """An exception as one line: its type only where the text alone would say little."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def leave(outcome: Outcome, role: str, message: str, *, in_flight: int = 0) -> int:
    """Writes the termination message and returns the exit code that goes with it."""
    words = Termination(outcome=outcome, role=role, host=host_name(), message=message, in_flight=in_flight)
    code = EXIT_CODES[outcome]
    level = logging.INFO if code == 0 else logging.ERROR
    log.log(level, "%s", message, extra={"outcome": outcome.value, "exit_code": code, "cut_off": in_flight})
    path = os.environ.get(TERMINATION_LOG_ENV) or (TERMINATION_LOG_PATH if Path(TERMINATION_LOG_PATH).exists() else "")
    if path:
        try:
            Path(path).write_text(words.encode())
        except OSError as error:
            log.warning("cannot write the termination message", extra={"path": path, "reason": error.strerror})
    return code
