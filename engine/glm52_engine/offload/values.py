"""What stands in the store under which name. Pure: bytes in, bytes out."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping

TRAILER_BYTES = 8
"""Behind a block's bytes: a CRC-32 over its key and its bytes, and their number."""


class Names:
    """Names of blocks in the store, for one kind of KV.

    `contract` is what two engines must have in common before one may read the other's blocks: it stands in every name,
    so that an engine never finds KV that it would read otherwise than it was written.
    """

    def __init__(self, contract: Mapping[str, str | int]) -> None:
        text = json.dumps(contract, sort_keys=True).encode()
        self._prefix = hashlib.blake2b(text, digest_size=16, person=b"kv contract").hexdigest()

    def of(self, key: bytes) -> str:
        return f"{self._prefix}/{key.hex()}"


def trailer(key: bytes, block: memoryview) -> bytes:
    """What is stored behind `block`, the bytes of the KV with that key."""
    return zlib.crc32(block, zlib.crc32(key)).to_bytes(4, "big") + (len(block) & 0xFFFFFFFF).to_bytes(4, "big")


def holds(key: bytes, value: memoryview) -> bool:
    """Whether a stored value is the block of that key, whole and unchanged."""
    if len(value) <= TRAILER_BYTES:
        return False
    return bytes(value[-TRAILER_BYTES:]) == trailer(key, value[:-TRAILER_BYTES])
