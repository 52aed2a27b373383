"""The store's client, a process of its own: `python -m glm52_engine.offload.client`, made by `offload.child`.

Mooncake's client holds Python's lock while it connects, which takes 90 s where no master answers, and a fault in it
ends its process. In the engine's own process the first would freeze every stream, and the second would end the pod.

A request on a socket is one line of JSON, [op, names], with the blocks of `put` and `get` in the slots of that socket's
stage; the answer is one line, a code for each name, negative for an error. The first line says that the store is there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

CONNECT_SECONDS = 2.0
RETRY_SECONDS = 1.0

LOCAL_BUFFER_BYTES = 16 << 20
"""Mooncake's own buffer, which it has no use for here; its least size."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """`sockets` and `stages`: file descriptors, pairwise; a stage is `slots` × `slot_bytes`. `segment_bytes`: memory
    that this pod gives to the store. `host`: its own address, which other pods read the segment at."""

    master: str
    host: str
    segment_bytes: int
    slot_bytes: int
    slots: int
    sockets: tuple[int, ...]
    stages: tuple[int, ...]

    def encode(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    options = ClientOptions(**json.loads(sys.argv[1]))
    _quiet()
    # The engine decides when this process ends: it closes the sockets, or is gone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sockets = [socket.socket(fileno=number) for number in options.sockets]
    stores: list[Any] = []
    leaver = threading.Thread(target=_leave_with, args=(sockets[0], stores))
    leaver.start()
    store = connect(options)
    stores.append(store)
    for sock, stage in zip(sockets, options.stages, strict=True):
        threading.Thread(target=_serve, args=(store, sock, stage, options), daemon=True).start()
    leaver.join()


def connect(options: ClientOptions) -> Any:
    """Waits until a master answers."""
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "3")
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", options.host)
    from mooncake.store import MooncakeDistributedStore

    host, _, port = options.master.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        except OSError:
            time.sleep(RETRY_SECONDS)
            continue
        store = MooncakeDistributedStore()
        code = store.setup(
            options.host, "P2PHANDSHAKE", options.segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", options.master
        )
        if code == 0:
            return store
        time.sleep(RETRY_SECONDS)


def _quiet() -> None:
    """Mooncake's log goes nowhere: a line for every block of a lost store, in a form of its own. Python's stays."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.enable(sys.stderr)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _leave_with(sock: socket.socket, stores: list[Any]) -> None:
    """Ends the process when the engine's end of the socket is closed, whatever the other threads wait for."""
    watch = select.poll()
    watch.register(sock, select.POLLRDHUP)
    watch.poll()
    for store in stores:
        # The master forgets this pod's part at once: else others are sent there until it is taken for dead.
        store.close()
    os._exit(0)


def _serve(store: Any, sock: socket.socket, stage: int, options: ClientOptions) -> None:
    memory = mmap.mmap(stage, options.slots * options.slot_bytes)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    slots = [first + index * options.slot_bytes for index in range(options.slots)]
    code = store.register_buffer(first, len(memory))
    operations: dict[str, Callable[[list[str]], list[int]]] = {
        "exist": store.batch_is_exist,
        "put": lambda names: store.batch_put_from(names, slots[: len(names)], [options.slot_bytes] * len(names)),
        "get": lambda names: store.batch_get_into(names, slots[: len(names)], [options.slot_bytes] * len(names)),
        "remove": lambda names: [store.remove(name, True) for name in names],
    }
    sock.sendall(json.dumps([code]).encode() + b"\n")
    for line in sock.makefile("rb"):
        op, names = json.loads(line)
        sock.sendall(json.dumps(list(operations[op](names))).encode() + b"\n")


if __name__ == "__main__":
    main()
