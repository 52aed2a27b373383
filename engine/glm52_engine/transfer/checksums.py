"""Debug mode of hand-offs: what a block's bytes were at prefill, and whether they are the same here."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence

from glm52_engine.transfer.descriptors import Region


def checksums(region: Region, blocks: Sequence[int]) -> list[int]:
    """CRC-32 of each block. Raises ValueError for one outside the pool; the pool must stay where it is meanwhile."""
    spans = region.spans([(block, 1) for block in blocks])
    return [zlib.crc32((ctypes.c_ubyte * size).from_address(address)) for address, size, _ in spans]


def damage(theirs: Sequence[int], ours: Sequence[int]) -> str:
    """Empty where all agree, else which blocks of the prompt do not."""
    wrong = [index for index, (sent, came) in enumerate(zip(theirs, ours, strict=True)) if sent != came]
    if not wrong:
        return ""
    shown = ", ".join(map(str, wrong[:5])) + (" …" if len(wrong) > 5 else "")
    return f"{len(wrong)} of {len(ours)} blocks came with other bytes than they have there: {shown}"
