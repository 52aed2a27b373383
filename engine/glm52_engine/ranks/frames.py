"""Frames on a control connection: a mark, the length of the payload, the payload. Nothing is read without a bound.

    4 bytes "GLMR" | length, uint32 big-endian | payload

The mark tells a peer of another protocol (a probe, a browser) at its first bytes: its text is never taken for a length.
"""

from __future__ import annotations

import asyncio
import struct

MARK = b"GLMR"
_HEADER = struct.Struct("!4sI")
HEADER_BYTES = _HEADER.size

HANDSHAKE_BYTES = 64 << 10
"""Of a peer that has not shown that it knows the secret."""

MOST_BYTES = 64 << 20
"""Of a peer that has: several prompts of a million tokens start in one step."""


class ProtocolError(Exception):
    """What a peer sent is not of this protocol; the connection is of no use any more."""


def frame(payload: bytes) -> bytes:
    if len(payload) > MOST_BYTES:
        raise ProtocolError(f"a message of {len(payload)} bytes; at most {MOST_BYTES} are sent")
    return _HEADER.pack(MARK, len(payload)) + payload


def payload_bytes(header: bytes, limit: int) -> int:
    """The length that a whole header announces; raises ProtocolError for a foreign or too large one."""
    mark, length = _HEADER.unpack(header)
    if mark != MARK:
        raise ProtocolError(f"the peer speaks another protocol: it begins with {mark!r}, expected {MARK!r}")
    if length > limit:
        raise ProtocolError(f"a frame of {length} bytes; at most {limit} are taken here")
    return int(length)


async def read_frame(reader: asyncio.StreamReader, limit: int) -> bytes | None:
    """The next payload; None where the peer ended the connection between two frames."""
    try:
        header = await reader.readexactly(HEADER_BYTES)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise ProtocolError(f"the connection ended within a header, after {len(error.partial)} bytes") from None
    length = payload_bytes(header, limit)
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        found = len(error.partial)
        raise ProtocolError(f"the connection ended within a frame, after {found} of {length} bytes") from None
