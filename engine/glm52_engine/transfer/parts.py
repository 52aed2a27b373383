"""A pull in parts, each by a lane of its own: how it is divided, and when the owner may say that all was read. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from glm52_engine.transfer.pulls import Pull
from glm52_engine.transfer.wire import Part, encode_part

PART_BYTES = 4 << 20
"""Least for a part: a question more costs what a millisecond of bytes does."""

FORGOTTEN_SECONDS = 300.0
"""Parts of which another one never came, since its lane was lost or the pull was cut: longer than any pull runs."""


def split(blocks: int, block_bytes: int, lanes: int, least: int) -> list[tuple[int, int]]:
    """First and end of at most `lanes` parts of nearly the same size, in order, none with less than `least` bytes
    unless it is the only one."""
    count = max(1, min(lanes, blocks // -(-least // block_bytes)))
    ends = [blocks * number // count for number in range(count + 1)]
    return list(itertools.pairwise(ends))


def parts_of(pull: Pull, lanes: int, name: str) -> list[Pull]:
    """One for each lane that is to take part, of `lanes` here and those that the peer has; `name` tells the pull from
    others. A single one is the pull as it is, also where it names what does not exist: who carries it out says so."""
    try:
        peer = pull.peer.holding(pull.remote_rank)
    except ValueError:
        return [pull]
    block_bytes = peer.regions[pull.remote_rank - peer.first_rank].block_bytes
    blocks = len(pull.remote_ids)
    if blocks != len(pull.local_ids) or block_bytes < 1:
        return [pull]
    shares = split(blocks, block_bytes, min(lanes, 1 + len(peer.lanes)), PART_BYTES)
    if len(shares) == 1:
        return [pull]
    notice = encode_part(Part(pull=name, of=len(shares), notice=pull.notice))
    return [
        replace(
            pull,
            peer=peer.by_lane(number),
            remote_ids=pull.remote_ids[first:end],
            local_ids=pull.local_ids[first:end],
            notice=notice,
        )
        for number, (first, end) in enumerate(shares)
    ]


@dataclass(slots=True)
class _Begun:
    since: float
    heard: int = 0


class Gathering:
    """The parts that have been written of each pull, at the pod that owns the KV."""

    def __init__(self) -> None:
        self._begun: dict[str, _Begun] = {}

    def __len__(self) -> int:
        return len(self._begun)

    def add(self, part: Part, now: float) -> bytes | None:
        """The notice of the whole pull where this was its last part."""
        for stale in _older(self._begun, now - FORGOTTEN_SECONDS):
            del self._begun[stale]
        begun = self._begun.setdefault(part.pull, _Begun(now))
        begun.heard += 1
        if begun.heard < part.of:
            return None
        del self._begun[part.pull]
        return part.notice


def _older(begun: dict[str, _Begun], than: float) -> Sequence[str]:
    """They are in the order in which they began."""
    found = []
    for pull, each in begun.items():
        if each.since >= than:
            break
        found.append(pull)
    return found
