"""One JSON object a line: time, level, part, message, what is bound to the request, then what the event adds."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TextIO

_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}
_BOUND: ContextVar[dict[str, Any]] = ContextVar("bound", default={})  # noqa: B039  (replaced, never changed)
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


@contextlib.contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Adds `fields` to every record of this task, and of the tasks and threads that it starts."""
    token = _BOUND.set({**_BOUND.get(), **fields})
    try:
        yield
    finally:
        _BOUND.reset(token)


class JsonFormatter(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "part": self.part,
            "message": record.getMessage(),
            **_BOUND.get(),
        }
        fields |= {key: _value(value) for key, value in record.__dict__.items() if key not in _OWN}
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = self.formatException(record.exc_info)
        line = json.dumps(fields, ensure_ascii=False, default=str)
        # Text of clients may hold half a surrogate pair, which no file and no pipe takes.
        return _LONE_SURROGATE.sub("\ufffd", line)


class Tail(logging.Handler):
    """Keeps the last lines, short, for the termination message: a pod that is gone has no log any more."""

    LINES, WIDTH = 20, 240

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=self.LINES)

    def emit(self, record: logging.LogRecord) -> None:
        stamp = time.strftime("%H:%M:%S", time.gmtime(record.created))
        text = " ".join(f"{stamp} {record.levelname} {record.getMessage()}".split())
        cause = record.exc_info[1] if record.exc_info else None
        if cause is not None:
            text += f" ({type(cause).__name__}: {' '.join(str(cause).split())})"
        self.lines.append(_LONE_SURROGATE.sub("\ufffd", text[: self.WIDTH]))


_tail = Tail()


def last_lines() -> tuple[str, ...]:
    """Of this process's log, oldest first; empty before `setup`."""
    return tuple(_tail.lines)


def _value(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value


def setup(part: str, stream: TextIO | None = None, level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(part))
    logging.basicConfig(level=level, handlers=[handler, _tail], force=True)
    for noisy in ("uvicorn.access", "aiohttp.access", "kubernetes", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
