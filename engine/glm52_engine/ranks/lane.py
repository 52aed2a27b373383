"""One rank's way through the collectives of a step; with `debug` each of them is checked against all other ranks.

Two ranks that are at different places would give each other wrong bytes, or wait for ever. The check is a collective
of its own, of a fixed size, before the real one and at both ends of a step: it pairs whatever the ranks are doing, so a
desync is told in the step in which it happens, by the ranks' own words.
"""

from __future__ import annotations

import torch

from glm52_engine.ranks.collectives import Collectives
from glm52_engine.ranks.messages import Shape

_KINDS = ("begins", "gathers", "exchanges", "ends")


class Desync(Exception):
    """Ranks of one replica are at different places."""


class Lane:
    def __init__(self, collectives: Collectives, *, device: torch.device, debug: bool = False) -> None:
        self.rank, self.world = collectives.rank, collectives.world
        self.collectives = collectives
        self.debug = debug
        self._device = device
        self._shape: Shape | None = None
        self._calls = 0

    @property
    def shape(self) -> Shape:
        if self._shape is None:
            raise RuntimeError(f"rank {self.rank} computes outside of any step")
        return self._shape

    def enter(self, shape: Shape) -> None:
        self._shape, self._calls = shape, 0
        self._agree("begins")

    def leave(self) -> None:
        self._agree("ends")
        self._shape = None

    def all_gather(self, block: torch.Tensor) -> torch.Tensor:
        """[bucket, n] → [world, bucket, n]."""
        self._agree("gathers")
        return self.collectives.all_gather(block)

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """[world, bucket, n], part i for rank i → the same, part i from rank i."""
        self._agree("exchanges")
        return self.collectives.all_to_all(parts)

    def _agree(self, kind: str) -> None:
        if not self.debug:
            return
        shape = self.shape
        here = [shape.number, self._calls, _KINDS.index(kind), shape.bucket]
        self._calls += 1
        found = self.collectives.all_gather(torch.tensor([here], device=self._device)).flatten(0, 1).tolist()
        if any(place != here for place in found):
            raise Desync("; ".join(f"rank {rank} {_words(*place)}" for rank, place in enumerate(found)))


def _words(number: int, call: int, kind: int, bucket: int) -> str:
    return f"{_KINDS[kind]} in step {number}, collective {call}, bucket {bucket}"
