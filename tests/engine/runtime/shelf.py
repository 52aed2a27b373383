"""A store of prefixes within the process, for what the engine does with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from glm52_engine.runtime.stored import Fetch, StoreCounters


class Shelf:
    """Keeps blocks as bytes; says that something is done when the test wants it to."""

    def __init__(self) -> None:
        self.counters = StoreCounters(up=True)
        self.kept: dict[bytes, Any] = {}
        self.most = 1000
        self.room = 1000
        self.held: list[Callable[[], None]] | None = None
        self.fetches: list[Fetch] = []
        self.answers = True

    def find(self, keys: Sequence[bytes], done: Callable[[int], None], *, within: float) -> None:
        if self.answers:
            done(next((i for i, key in enumerate(keys) if key not in self.kept), len(keys)))

    def fetch(self, pool: Any, blocks: Sequence[int], keys: Sequence[bytes], done: Callable[[int], None]) -> Fetch:
        self.fetches.append(Fetch())

        def bring() -> None:
            for block, key in list(zip(blocks, keys, strict=True))[: self.most]:
                pool[block].copy_(self.kept[key])
            done(min(self.most, len(keys)))

        self._when_wanted(bring)
        return self.fetches[-1]

    def save(self, pool: Any, blocks: Sequence[int], keys: Sequence[bytes], done: Callable[[int], None]) -> bool:
        def take() -> None:
            self.kept |= {key: pool[block].clone() for key, block in zip(keys, blocks, strict=True)}
            done(len(keys))

        self._when_wanted(take)
        return True

    def discard(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.kept.pop(key, None)

    def close(self) -> None:
        self.go_on()

    def hold(self) -> None:
        self.held = []

    def go_on(self) -> None:
        held, self.held = self.held or [], None
        for call in held:
            call()

    def _when_wanted(self, call: Callable[[], None]) -> None:
        if self.held is None:
            call()
        else:
            self.held.append(call)
