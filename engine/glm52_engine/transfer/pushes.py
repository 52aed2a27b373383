"""The side that owns KV: it writes what decode peers ask for into their pools, and says when that is over.

It is the owner that sends, also where a transport has READs. Over TCP a READ is answered by software of the side that
is read, and UCX aborts there when the reader is killed in the middle; a WRITE that fails is an error of who writes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from glm52_engine.transfer.descriptors import Region
from glm52_engine.transfer.wire import Ask, Look, Over, encode, has_ended

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Push:
    asker: str
    ask: Ask
    handle: Any


@dataclass(slots=True)
class _Line:
    """The connection to a decode peer, in the life that the peer gave it."""

    life: int
    up: bool = True
    refused: set[int] = field(default_factory=set)
    """Said to be over before they were heard of: they must not begin any more."""
    unsure: set[int] = field(default_factory=set)
    """Failed while the connection goes on: nothing says that none of their bytes is still on its way."""


class Pushes:
    """Of one agent, on its thread. `on_notice`: of what a peer attached, once every byte is in its pool."""

    def __init__(self, nixl: Any, regions: Sequence[Region], on_notice: Callable[[bytes], None]) -> None:
        self._nixl = nixl
        self._regions = regions
        self._on_notice = on_notice
        self._lines: dict[str, _Line] = {}
        self._ends: set[str] = set()
        """Whose connection has ended, to be forgotten when nothing uses it any more."""
        self._asked: list[tuple[str, Ask]] = []
        self._running: list[_Push] = []

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def ask(self, asker: str, ask: Ask) -> None:
        self._asked.append((asker, ask))

    def look(self, asker: str, look: Look) -> None:
        """Answered only on the connection that it is about: on another one the word could overtake the last bytes."""
        line = self._lines.get(asker)
        if line is None or line.life != look.life:
            return
        unsaid = {push.ask.number for push in self._running if push.asker == asker} | line.unsure
        unsaid |= {ask.number for name, ask in self._asked if name == asker}
        for number in [number for number in look.numbers if number not in unsaid]:
            line.refused.add(number)
            self._tell(asker, Over(number=number, error="it was not asked for, or its end was told"))

    def turn(self) -> None:
        """Begins what was asked for and looks after what runs."""
        asked, self._asked = self._asked, []
        for asker, ask in asked:
            self._begin(asker, ask)
        self._running = [push for push in self._running if not self._ended(push)]
        for asker in [asker for asker in self._ends if not self._runs_to(asker)]:
            self._ends.discard(asker)
            with contextlib.suppress(Exception):
                self._nixl.remove_remote_agent(asker)

    def close(self) -> None:
        for push in self._running:
            _release(push.handle)
        self._running = []

    def _runs_to(self, asker: str) -> bool:
        return any(push.asker == asker for push in self._running)

    def _begin(self, asker: str, ask: Ask) -> None:
        line = self._lines.get(asker)
        if line is None or ask.life > line.life:
            if self._runs_to(asker):
                # On a connection that has ended, as the peer knows: here that is still to be found.
                self._asked.append((asker, ask))
                return
            line = self._connect(asker, ask)
        if not line.up or ask.life != line.life or ask.number in line.refused:
            # What was asked on a connection that has ended is over for the peer as well: it sees the same end.
            return
        try:
            handle = self._prepared(asker, ask)
        except Exception as error:
            self._tell(asker, Over(number=ask.number, error=str(error) or type(error).__name__))
            return
        push = _Push(asker, ask, handle)
        try:
            failed = self._nixl.transfer(handle) == "ERR"
        except Exception as error:
            self._lost(push, error)
        else:
            if failed:
                self._lost(push, "it could not be posted")
            else:
                self._running.append(push)

    def _connect(self, asker: str, ask: Ask) -> _Line:
        for name in self._lines:
            # Which others have ended shows only when something is sent.
            self._tell(name, Over(number=0))
        if asker in self._lines:
            self._ends.discard(asker)
            with contextlib.suppress(Exception):
                self._nixl.remove_remote_agent(asker)
        line = self._lines[asker] = _Line(ask.life)
        try:
            self._nixl.add_remote_agent(ask.metadata)
        except Exception as error:
            line.up = False
            log.warning("a decode peer cannot be written to", extra={"peer": asker, "reason": str(error)})
        return line

    def _prepared(self, asker: str, ask: Ask) -> Any:
        """A WRITE of which nothing has been sent yet. Raises ValueError for blocks that do not exist."""
        if ask.rank >= len(self._regions):
            raise ValueError(f"rank {ask.rank} of a pod with {len(self._regions)}")
        ours = self._regions[ask.rank].spans([(there, count) for there, _, count in ask.runs])
        theirs = Region(*ask.into).spans([(here, count) for _, here, count in ask.runs])
        descriptors = self._nixl.get_xfer_descs(ours, "DRAM"), self._nixl.get_xfer_descs(theirs, "DRAM")
        return self._nixl.initialize_xfer("WRITE", *descriptors, asker)

    def _ended(self, push: _Push) -> bool:
        try:
            state = str(self._nixl.check_xfer_state(push.handle))
        except Exception as error:
            self._lost(push, error)
            return True
        if state == "PROC":
            return False
        if state == "DONE":
            _release(push.handle)
            self._on_notice(push.ask.notice)
            self._tell(push.asker, Over(number=push.ask.number))
        else:
            self._lost(push, state)
        return True

    def _tell(self, asker: str, over: Over) -> None:
        line = self._lines[asker]
        try:
            if line.up:
                self._nixl.send_notif(asker, encode(over))
        except Exception as error:
            log.info("a decode peer cannot be told", extra={"peer": asker, "reason": str(error)})
            if has_ended(error):
                line.up = False
                self._ends.add(asker)

    def _lost(self, push: _Push, reason: object) -> None:
        """The peer sees the end of its connection as well, and nothing is told on a new one: that would say nothing
        about bytes that are still in the old one."""
        _release(push.handle)
        log.warning("KV could not be sent", extra={"peer": push.asker, "reason": str(reason)})
        self._lines[push.asker].unsure.add(push.ask.number)
        self._tell(push.asker, Over(number=0))


def _release(handle: Any) -> None:
    try:
        handle.release()
    except Exception as error:
        log.warning("a transfer handle is not released", extra={"reason": str(error) or type(error).__name__})
