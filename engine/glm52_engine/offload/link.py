"""Whether the store can be asked now, and what is done when it cannot."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from glm52_engine.offload.child import Channel, Child, StoreDown
from glm52_engine.runtime.stored import StoreCounters

log = logging.getLogger(__name__)

RESTART_SECONDS = 5.0
"""Between two starts of a client that ends by itself."""

HUNG_SECONDS = 30.0
"""Without an answer to anything from a client that had found the store: it is ended and made anew."""

PROBE = "probe"
"""A name that nothing is stored under."""


class Link:
    """The client's process over its lives. `tend` is called by one thread again and again, the rest by any.

    Only what was asked last counts: the store is up from a probe that is answered until a call that fails.
    """

    def __init__(self, make: Callable[[], Child], counters: StoreCounters) -> None:
        self._make = make
        self._counters = counters
        self._child: Child | None = None
        self._made = float("-inf")
        self._closed = False

    @property
    def up(self) -> bool:
        return self._counters.up

    @property
    def pid(self) -> int | None:
        """Of the client's process, where there is one."""
        return self._child.pid if self._child is not None else None

    @property
    def slots(self) -> int:
        """Blocks that one call can carry."""
        return self._child.slots if self._child is not None else 1

    def channel(self, index: int) -> Channel:
        """Raises StoreDown where there is no client."""
        if self._child is None:
            raise StoreDown("the store's client does not run")
        return self._child.channels[index]

    def lost(self, reason: object) -> None:
        if self._counters.up:
            log.warning("the prefix store is lost: prefixes are computed", extra={"reason": str(reason)})
        self._counters.up = False

    def tend(self, index: int, seconds: float) -> None:
        """On the thread that owns channel `index`: a client that is gone is made anew, the store is asked."""
        if self._closed:
            return
        child = self._child
        if child is not None and (child.code() is not None or self._hangs(child, index)):
            self.lost(f"its client ended with code {child.code()}" if child.code() is not None else "its client hangs")
            child.end()
            self._child = child = None
        if child is None:
            if time.monotonic() - self._made < RESTART_SECONDS:
                return
            self._made = time.monotonic()
            try:
                self._child = child = self._make()
            except OSError as error:
                log.error("the prefix store's client cannot be started", extra={"reason": str(error)})
                return
        # Also while it is up: a pod without prompts would otherwise go on saying so of a store that is gone.
        self._probe(child.channels[index], seconds)

    def close(self) -> None:
        """Again, once no thread tends it any more: that thread may just have made a client."""
        self._closed = True
        child, self._child = self._child, None
        self._counters.up = False
        if child is not None:
            child.end()

    def _probe(self, channel: Channel, seconds: float) -> None:
        try:
            channel.call("exist", [PROBE], seconds)
        except StoreDown as error:
            self.lost(error)
            return
        if not self._counters.up:
            log.info("the prefix store answers")
        self._counters.up = True

    def _hangs(self, child: Child, index: int) -> bool:
        heard = child.channels[index].heard
        return not self._counters.up and heard is not None and time.monotonic() - heard > HUNG_SECONDS
