"""Reading request bodies of any size without holding up whoever else is served by the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from glm52_engine.serve.errors import bad
from glm52_engine.serve.fields import MAX_DEPTH, MAX_VALUES, parse_object

ON_THREAD_BYTES = 64 << 10
"""Parsing more than this takes longer than the way to a thread and back."""

T = TypeVar("T")


async def read(raw: bytes, use: Callable[[dict[str, Any]], T], *, internal: bool = False) -> T:
    """`use` of the parsed body; raises ApiError 400, and what `use` raises.

    `internal`: a call of ours, which wraps a client's body in one more object and may list a prompt's tokens.
    """
    limits = (MAX_DEPTH + 1, 2 * MAX_VALUES) if internal else (MAX_DEPTH, MAX_VALUES)
    if len(raw) <= ON_THREAD_BYTES:
        return use(parse_object(raw, *limits))
    return await asyncio.to_thread(lambda: use(parse_object(raw, *limits)))


def check_content_type(value: str) -> None:
    """Raises ApiError 400 for a body that calls itself something else than JSON; one that says nothing is JSON."""
    kind = value.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise bad(f"content-type: found {kind!r}, expected 'application/json'", code="unsupported_content_type")
