"""The engine's end of the store's client: a process, and channels to it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from glm52_engine.offload.client import ClientOptions

STAGE_BYTES = 64 << 20
"""Of one channel: blocks on their way. Two of them are part of `sizing.STORE_OVERHEAD`."""

MOST_SLOTS = 64

LEAVE_SECONDS = 2.0
"""For the client to take its part out of the store."""

RPC_FAILED = -900
"""Mooncake's code where the master does not answer."""


class StoreDown(Exception):
    """The master or the client does not answer; what was asked may still happen."""


class Channel:
    """One thread's way to the client: one request at a time.

    `slot(i)` is the memory of block i of a `put` or a `get`. Only the owner of the channel touches it, and only while
    no answer is outstanding: a late `get` still writes there.
    """

    def __init__(self, sock: socket.socket, stage: int, *, slots: int, slot_bytes: int) -> None:
        self._socket = sock
        self._memory = mmap.mmap(stage, slots * slot_bytes)
        self._view = memoryview(self._memory)
        self._slot_bytes = slot_bytes
        self._received = b""
        # The first line comes unasked, once the client has found the store.
        self._outstanding = True
        self.heard: float | None = None
        """When the client last answered anything, in monotonic seconds."""

    def slot(self, index: int) -> memoryview:
        return self._view[index * self._slot_bytes : (index + 1) * self._slot_bytes]

    def call(self, op: str, names: Sequence[str], seconds: float) -> list[int]:
        """A code for each name. Raises StoreDown where no answer comes in time or the master cannot be reached."""
        if not names:
            return []
        if self._outstanding:
            # An answer that came too late for its call, or the first line.
            self._answer(seconds)
        try:
            self._socket.settimeout(max(seconds, 0.01))
            self._socket.sendall(json.dumps([op, list(names)]).encode() + b"\n")
        except OSError as error:
            raise StoreDown(f"the store's client is gone ({error})") from error
        self._outstanding = True
        codes = self._answer(seconds)
        if len(codes) != len(names) or RPC_FAILED in codes:
            raise StoreDown("the store's master does not answer")
        return codes

    def hang_up(self) -> None:
        """From any thread: a call that waits fails, and so does every later one."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _answer(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.0005))
            try:
                part = self._socket.recv(1 << 16)
            except TimeoutError as error:
                raise StoreDown(f"the store has not answered within {seconds:.1f} s") from error
            except OSError as error:
                raise StoreDown(f"the store's client is gone ({error})") from error
            if not part:
                raise StoreDown("the store's client has ended")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        self._outstanding = False
        self.heard = time.monotonic()
        codes: list[int] = json.loads(line)
        return codes


class Child:
    """The client's process with `channels` channels. Raises OSError where it cannot be made."""

    def __init__(self, *, master: str, host: str, segment_bytes: int, slot_bytes: int, channels: int) -> None:
        slots = max(1, min(MOST_SLOTS, STAGE_BYTES // slot_bytes))
        self.slots = slots
        pairs = [socket.socketpair() for _ in range(channels)]
        stages = [os.memfd_create("glm52-store") for _ in range(channels)]
        try:
            for stage in stages:
                os.ftruncate(stage, slots * slot_bytes)
            ends = tuple(theirs.fileno() for _, theirs in pairs)
            options = ClientOptions(master, host, segment_bytes, slot_bytes, slots, ends, tuple(stages))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "glm52_engine.offload.client", options.encode()],
                stdin=subprocess.DEVNULL,
                pass_fds=[*ends, *stages],
            )
            self.channels = [
                Channel(ours, stage, slots=slots, slot_bytes=slot_bytes)
                for (ours, _), stage in zip(pairs, stages, strict=True)
            ]
        finally:
            for _, theirs in pairs:
                theirs.close()
            for stage in stages:
                os.close(stage)

    @property
    def pid(self) -> int:
        return self._process.pid

    def code(self) -> int | None:
        """How the process ended; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Ends it and everything that it does, in order where it still can, and waits for that."""
        for channel in self.channels:
            channel.hang_up()
        try:
            self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
