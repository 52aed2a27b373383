from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from glm52_engine.lifecycle.logs import JsonFormatter, bound


def line(message: str, **fields: Any) -> dict[str, Any]:
    record = logging.makeLogRecord({"msg": message, "levelname": "INFO", **fields})
    text = JsonFormatter("decode").format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text.encode())
    return found


def test_a_record_is_one_line_of_json_with_valid_text() -> None:
    found = line("two\nlines \ud83d", request="a b", tokens=3, seconds=0.1234567, of=object)
    assert (found["level"], found["part"], found["message"]) == ("INFO", "decode", "two\nlines \ufffd")
    assert (found["request"], found["tokens"], found["seconds"]) == ("a b", 3, 0.123457)
    assert found["time"].endswith("Z")


def test_an_exception_keeps_its_traceback() -> None:
    try:
        raise ValueError("wrong")
    except ValueError as error:
        found = line("failed", exc_info=(type(error), error, error.__traceback__))
    assert found["traceback"].splitlines()[-1] == "ValueError: wrong"


async def test_what_is_bound_reaches_tasks_and_threads_and_nobody_else() -> None:
    async def inside() -> tuple[Any, Any]:
        return line("x").get("request_id"), (await asyncio.to_thread(line, "x")).get("request_id")

    with bound(request_id="r1"), bound(trace_id="t"):
        assert await asyncio.create_task(inside()) == ("r1", "r1")
        assert line("x")["trace_id"] == "t"
    assert "request_id" not in line("x")
