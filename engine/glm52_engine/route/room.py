"""How many bytes of clients' bodies a router holds at one time: a body may have 32 MB, and its pod is small."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from glm52_engine.serve.errors import RETRY_AFTER_SECONDS, ApiError
from glm52_engine.sizing import ROUTER_BODY_BYTES


class Room:
    """A body is held for as long as its request may have to be repeated at another pod."""

    def __init__(self, limit: int = ROUTER_BODY_BYTES) -> None:
        self.limit = limit
        self.taken = 0

    @contextlib.contextmanager
    def take(self, most: int) -> Iterator[Callable[[int], None]]:
        """Keeps `most` bytes until the end of the block; what it gives is told how many there really are.

        Raises ApiError 429 when so many are not left.
        """
        if self.taken + most > self.limit:
            words = (
                f"requests of {self.taken >> 20} MB are in progress, and {self.limit >> 20} MB may be: try again later"
            )
            raise ApiError(429, words, code="too_many_bytes", retry_after=RETRY_AFTER_SECONDS)
        size = most
        self.taken += size

        def settle(really: int) -> None:
            nonlocal size
            self.taken += really - size
            size = really

        try:
            yield settle
        finally:
            self.taken -= size
