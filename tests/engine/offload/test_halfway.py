"""A client that is killed while a block of its own is on the way: nobody finds half of it, then or later."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
import torch

from glm52_engine.config import StoreConfig
from glm52_engine.offload.store import PrefixStore
from tests.engine.offload.conftest import DEADLINE, Master

BLOCK_BYTES = 16 << 20
"""More than the kernel keeps of a connection that nobody reads from."""

KEYS = tuple(bytes([number]) * 32 for number in range(2))


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 2 * DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@dataclass(frozen=True)
class Address:
    address: str


@contextmanager
def client(master: Master | Address, gib: int) -> Iterator[PrefixStore]:
    """`gib` 0: one that gives nothing to the store, so that its blocks lie with others."""
    store = PrefixStore(
        StoreConfig.model_construct(master=master.address, store_gib=gib),
        {"of": "halves"},
        block_bytes=BLOCK_BYTES,
        pool_blocks=64,
        host="127.0.0.1",
    )
    store.start()
    try:
        until(lambda: store.counters.up, "the store does not answer")
        yield store
    finally:
        store.close()


def told(ask: Callable[[Callable[[int], None]], object]) -> int:
    """What `done` is called with."""
    answers: list[int] = []
    over = threading.Event()

    def done(count: int) -> None:
        answers.append(count)
        over.set()

    ask(done)
    assert over.wait(2 * DEADLINE)
    return answers[0]


def found(reader: PrefixStore) -> int:
    return told(lambda done: reader.find(KEYS, done, within=DEADLINE))


def fetched(reader: PrefixStore) -> tuple[int, torch.Tensor]:
    pool = torch.zeros(len(KEYS), BLOCK_BYTES, dtype=torch.uint8)
    return told(lambda done: reader.fetch(pool, range(len(KEYS)), KEYS, done)), pool


def pid_of(store: PrefixStore) -> int:
    pid = store.link.pid
    assert pid is not None
    return pid


def puts(master: Master, of: str) -> int:
    """Blocks whose put has begun (`start`) or ended (`end`), as the master counts."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{master.health_port}/metrics", timeout=DEADLINE).read().decode()
    name = f"master_batch_put_{of}_items_total "
    return sum(int(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


def test_half_a_block_is_no_block(master: Master) -> None:
    content = torch.randint(0, 256, (len(KEYS), BLOCK_BYTES), dtype=torch.uint8)
    with ExitStack() as open_:
        holder, reader = (open_.enter_context(client(master, gib)) for gib in (1, 0))
        with client(master, 0) as writer:
            saved: list[int] = []
            # Frozen, the one who has the memory takes a part of a block and no more.
            os.kill(pid_of(holder), signal.SIGSTOP)
            try:
                assert writer.save(content, range(len(KEYS)), KEYS, saved.append)
                until(lambda: puts(master, "start") == len(KEYS), "nothing is on its way")
                os.kill(pid_of(writer), signal.SIGKILL)
                until(lambda: saved, "the save never ended")
                assert saved == [0]
            finally:
                os.kill(pid_of(holder), signal.SIGCONT)
            assert found(reader) == 0
            assert fetched(reader)[0] == 0
            # What is called saved is there, and nothing of before stands in its way for long.
            until(lambda: writer.counters.up, "the client is not made anew")
            until(
                lambda: told(lambda done: writer.save(content, range(len(KEYS)), KEYS, done)) == len(KEYS),
                "the names stay taken",
            )
            there, pool = fetched(reader)
            assert there == len(KEYS)
            assert torch.equal(pool, content)


def content_of(seed: int) -> tuple[list[bytes], torch.Tensor]:
    """Keys and blocks of one save."""
    drawn = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (len(KEYS), BLOCK_BYTES), dtype=torch.uint8, generator=drawn)
    return [bytes([seed, number]) * 16 for number in range(len(KEYS))], blocks


SAVER = """
import sys, threading
from tests.engine.offload.test_halfway import Address, client, content_of
with client(Address(sys.argv[1]), 1) as store:
    keys, blocks = content_of(int(sys.argv[2]))
    store.save(blocks, range(len(keys)), keys, lambda count: None)
    threading.Event().wait()
"""


@pytest.mark.parametrize("group", [False, True], ids=["the engine", "the engine and its client"])
def test_a_process_that_is_killed_while_it_saves_leaves_whole_blocks_or_none(master: Master, group: bool) -> None:
    with ExitStack() as open_:
        open_.enter_context(client(master, 1))
        reader = open_.enter_context(client(master, 0))
        for seed in range(3):
            before = puts(master, "start")
            saver = subprocess.Popen([sys.executable, "-c", SAVER, master.address, str(seed)], start_new_session=True)
            open_.callback(end, saver)
            until(lambda before=before: puts(master, "start") > before, "nothing is on its way")  # type: ignore[misc]
            if group:
                os.killpg(saver.pid, signal.SIGKILL)
            else:
                saver.kill()
            saver.wait()
            keys, blocks = content_of(seed)
            for key, block in zip(keys, blocks, strict=True):
                pool = torch.zeros(1, BLOCK_BYTES, dtype=torch.uint8)
                if told(lambda done, key=key, pool=pool: reader.fetch(pool, [0], [key], done)):  # type: ignore[misc]
                    assert torch.equal(pool[0], block)


def end(process: subprocess.Popen[bytes]) -> None:
    """With its client, which the session's leader may have left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
