"""Waiting before a start, as long as the operator says after crashes: what cannot run must not load for ever.

Restarting is the kubelet's, whose own back-off ends at five minutes; each start reads the weights and takes hundreds of
gigabytes of memory. So the container starts as the kubelet likes, and waits here with nothing loaded.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
from collections.abc import Callable

from glm52_engine.config import HOLD_ENV, Hold

log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0
"""A clock that is set while we sleep is noticed after that."""


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


async def wait_for_turn(
    tell: Callable[[str], None], hold: Hold | None, now: Callable[[], datetime.datetime] = utc_now
) -> bool:
    """Returns when the process may start; whether it had to wait, of which `tell` is told why and until when.

    Held without an end, it is ended by TERM only.
    """
    if hold is None or (hold.until is not None and hold.until <= now()):
        return False
    until = f"until {hold.until:%Y-%m-%dT%H:%M:%SZ}" if hold.until else "until the specification is changed"
    tell(f"held {until}: {hold.why}")
    while hold.until is None or now() < hold.until:
        left = LOOK_SECONDS if hold.until is None else (hold.until - now()).total_seconds()
        await asyncio.sleep(min(LOOK_SECONDS, max(0.0, left)))
    return True


def given_hold() -> Hold | None:
    """What this container was told at its start."""
    text = os.environ.get(HOLD_ENV, "")
    hold = Hold.decode(text)
    if text and hold is None:
        log.warning("not understood, and not waited for", extra={HOLD_ENV: text[:200]})
    return hold
