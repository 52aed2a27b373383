"""The tokens of one decode, on their way from the step loop to one consumer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from glm52_engine.runtime.types import Token


class TokenStream:
    """An async iterator that frees what it stands for however it ends: exhausted, closed, cancelled or dropped.

    Not an async generator: one that is closed before its first step never runs its `finally`.
    """

    def __init__(self, close: Callable[[], None], first: Token) -> None:
        self._close = close
        self._last = first
        self._tokens: deque[Token] = deque()
        self._news = asyncio.Event()
        self._ended = False
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        try:
            while not self._tokens:
                if self._ended:
                    raise StopAsyncIteration
                self._news.clear()
                await self._news.wait()
        except asyncio.CancelledError:
            self._close()
            raise
        return self._tokens.popleft()

    async def aclose(self) -> None:
        self._tokens.clear()
        self.end()
        self._close()

    def __del__(self) -> None:
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing left to free
                self._loop.call_soon_threadsafe(self._close)

    def put(self, token: Token) -> None:
        if self._ended:
            return
        self._tokens.append(token)
        self._last = token
        self._ended = token.finish is not None
        self._news.set()

    def abort(self) -> None:
        """End with finish 'abort' on a repeat of the last token: there is no next one, and the field wants an id."""
        self.put(Token(self._last.id, self._last.index, "abort"))

    def end(self) -> None:
        """End without another token."""
        self._ended = True
        self._news.set()
