"""`python -m e2e.controlplane.hurried N ARGUMENTS`: the operator, with its timers N times as fast.

Minutes in which it shall do nothing pass in seconds: all that it does by the clock it does N times as often. Times that
others need are left as they are: how long an answer may take, and the lease, which is about other processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import selectors
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import aiohttp
import kopf  # noqa: F401 — its annotations need the class as it is


class _Selector(selectors.DefaultSelector):
    """Waits for a part of the time that it is told to."""

    factor = 1.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout / self.factor if timeout is not None else None)


class _Loop(asyncio.SelectorEventLoop):
    factor = 1.0

    def __init__(self) -> None:
        selector = _Selector()
        selector.factor = self.factor
        super().__init__(selector)

    def time(self) -> float:
        return super().time() * self.factor


class _Policy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return _Loop()


def _as_ever(factor: float) -> Callable[..., aiohttp.ClientTimeout]:
    """aiohttp's limits, which it measures by the loop's clock."""
    own = aiohttp.ClientTimeout

    def limits(**seconds: Any) -> aiohttp.ClientTimeout:
        return own(**{name: value and value * factor for name, value in seconds.items()})

    return limits


def main() -> int:
    factor = float(sys.argv.pop(1))
    _Loop.factor = factor
    asyncio.set_event_loop_policy(_Policy())
    # Before the operator is imported: some limits are made there.
    with mock.patch.object(aiohttp, "ClientTimeout", _as_ever(factor)):
        from glm52_operator import cli
        from glm52_operator.plan.election import Timing
        from glm52_operator.reconcile import lease, watch

        usual, settings = dataclasses.asdict(Timing()), watch.settings

        def hurried() -> Any:
            own = settings()
            # The server measures this one.
            own.watching.server_timeout = max(1, round((own.watching.server_timeout or 0) / factor))
            own.watching.inactivity_timeout *= factor
            return own

        timing = Timing(**{name: seconds * factor for name, seconds in usual.items()})
        with (
            mock.patch.object(lease, "Timing", return_value=timing),
            mock.patch.object(watch, "settings", hurried),
        ):
            return cli.main()


if __name__ == "__main__":
    sys.exit(main())
