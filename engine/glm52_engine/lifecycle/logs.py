"""One line per event: time, level, part, message, then key=value. No line ever holds a newline or a lone surrogate."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


class LineFormatter(logging.Formatter):
    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        words = [f"{stamp}.{int(record.msecs):03d}Z", record.levelname, self.part, _one_line(record.getMessage())]
        words += [f"{key}={_value(value)}" for key, value in record.__dict__.items() if key not in _OWN]
        if record.exc_info and record.exc_info[1] is not None:
            words.append("trace=" + _value(self.formatException(record.exc_info)))
        return " ".join(words).encode("utf-8", "replace").decode()


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return (
        text if text and text.isprintable() and not set(text) & set(" \"='") else json.dumps(text, ensure_ascii=False)
    )


def setup(part: str, stream: TextIO | None = None, level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(part))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("uvicorn.access", "aiohttp.access", "kubernetes", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
