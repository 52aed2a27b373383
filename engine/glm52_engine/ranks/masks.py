"""Grammars of a replica: they advance where the coordinator is, and ranks are told what may come next.

A grammar is compiled from the client's request and lives in the leader's memory. What a rank needs of it is one mask a
token, which travels with the plan of the step that draws the token.
"""

from __future__ import annotations

import base64
import binascii
import logging
from dataclasses import replace

from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.ranks.messages import Mask
from glm52_engine.runtime.rank import Event, Running
from glm52_engine.structured import GrammarError

log = logging.getLogger(__name__)


def mask_of(sequence: Running) -> Mask | None:
    """For the next token of a sequence; None where anything may come."""
    matcher = sequence.constraint
    if matcher is None:
        return None
    return Mask(sequence.seat, base64.b64encode(matcher.mask()).decode(), matcher.ended)


def advanced(sequence: Running, event: Event) -> Event:
    """The sequence's grammar takes the token in. Where it cannot, the token's finish becomes `error`."""
    matcher, token = sequence.constraint, event.token
    if matcher is None or token is None or token.finish == "error":
        return event
    try:
        matcher.check()
        # Several choices go on elsewhere, each from where the grammar was.
        if token.finish is None and sequence.choices == 1:
            matcher.accept(token.id)
    except GrammarError as error:
        log.warning("%s", error)
        return replace(event, token=replace(token, finish="error"))
    return event


class GivenMask:
    """On a rank in the place of a `structured.Matcher`: it allows what it was told last."""

    reasons = True
    """As of a matcher whose mask is not computed but there."""

    def __init__(self) -> None:
        self._bits: bytes | None = None
        self.ended = False

    @property
    def given(self) -> bool:
        return self._bits is not None

    @property
    def mask_bytes(self) -> int:
        return len(self.mask())

    def give(self, mask: Mask) -> None:
        """Raises ProtocolError for bits that are no whole number of 32-bit words."""
        try:
            bits = base64.b64decode(mask.bits, validate=True)
        except binascii.Error as error:
            raise ProtocolError(f"a mask that is no base64: {error}") from None
        if not bits or len(bits) % 4:
            raise ProtocolError(f"a mask of {len(bits)} bytes; expected whole words of 4")
        self._bits, self.ended = bits, mask.ended

    def fork(self) -> GivenMask:
        """Itself: the sequence that took the seat is the only one."""
        return self

    def mask(self) -> bytes:
        assert self._bits is not None
        return self._bits

    def accept(self, token: int) -> None:
        """A mask is for one token."""
        self._bits = None

    def check(self) -> None:
        """The coordinator looks whether the grammar can go on."""
