"""What the engine asks of a store of prefixes outside the pod, and what it tells of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(slots=True)
class StoreCounters:
    """`up`: whether the store answers now. The rest only grows; blocks, except `fetches_failed` and `lookups_failed`.

    `blocks_dropped` were not saved because too many waited or the store was not there.
    """

    up: bool = False
    blocks_saved: int = 0
    blocks_dropped: int = 0
    blocks_fetched: int = 0
    fetches_failed: int = 0
    lookups_failed: int = 0


@dataclass(slots=True)
class Fetch:
    """Blocks on their way in. Once `cancelled` is set no further ones are begun; `done` comes all the same."""

    cancelled: bool = False


class BlockStore(Protocol):
    """Blocks by the keys of their prefixes. Nothing here waits or raises: whatever fails is less of a prefix.

    `pool` is uint8 [num_blocks, block_bytes] on the CPU. Every `done` is called once, on a thread of the store.
    """

    counters: StoreCounters

    @property
    def room(self) -> int:
        """Blocks that `save` would take now, were the store there."""
        ...

    def find(self, keys: Sequence[bytes], done: Callable[[int], None], *, within: float) -> None:
        """`done` with the number of leading keys that the store has; after `within` seconds nobody waits for it."""
        ...

    def fetch(self, pool: Any, blocks: Sequence[int], keys: Sequence[bytes], done: Callable[[int], None]) -> Fetch:
        """Brings the KV of `keys` into `blocks`, in order; `done` with the number of leading ones that hold it now.

        Until `done` the blocks may be written to, and never after it.
        """
        ...

    def save(self, pool: Any, blocks: Sequence[int], keys: Sequence[bytes], done: Callable[[int], None]) -> bool:
        """Puts what the store lacks of the blocks there; they must stay as they are until `done`, which gets the
        number of those that are new there. False: nothing is done and `done` not called."""
        ...

    def discard(self, keys: Sequence[bytes]) -> None:
        """Nobody shall find these any more."""
        ...

    def close(self) -> None:
        """Returns when no pool is touched any more and every `done` was called."""
        ...
