"""Decode pods that are killed while they pull, each a fork of this process: prints how each one ended.

Lines on stdin: the card of a prefill pod, then for each decode pod the block of which a byte is there when it is
killed, or `steady` for one that only pulls. Each is as several pods with several pulls: there is more to go wrong. The
argument says how many lanes each of those has.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys

import nixl_cu13  # noqa: F401  (forks need not import it again)

from glm52_engine.transfer.lanes import Lanes
from glm52_engine.transfer.peers import AgentCard
from glm52_engine.transfer.pulls import Peer, Pull
from tests.engine.transfer.peer import WidePool

BLOCKS, BLOCK_BYTES = 64, 1 << 20
EVERYTHING = list(range(BLOCKS))
PODS, PULLS = 4, 4


def main(lanes: int) -> None:
    peer = AgentCard.model_validate_json(sys.stdin.readline()).peer()
    steady = 0
    for number, line in enumerate(sys.stdin):
        pid = os.fork()
        if not pid:
            name = f"decode/{number}"
            asyncio.run(read(peer, name, lanes) if line.strip() == "steady" else fall(peer, name, lanes, int(line)))
            os._exit(0)
        if line.strip() == "steady":
            steady = pid
        else:
            ended(pid)
    os.kill(steady, signal.SIGKILL)
    ended(steady)


def ended(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    print(f"ENDED {os.waitstatus_to_exitcode(status)}", flush=True)


async def read(peer: Peer, name: str, lanes: int) -> None:
    agent, _ = made(name, lanes)
    while True:
        await agent.pull(Pull(peer, 0, EVERYTHING, 0, EVERYTHING, b"whole"))


async def fall(peer: Peer, name: str, lanes: int, block: int) -> None:
    all_made = [made(f"{name}/{index}", lanes) for index in range(PODS)]
    parts = [EVERYTHING[first::PULLS] for first in range(PULLS)]
    # Connections are there before.
    await asyncio.gather(*(agent.pull(Pull(peer, 0, [0], 0, [0], b"first")) for agent, _ in all_made))
    for _, pool in all_made:
        ctypes.memset(pool.tensor.data_ptr(), 0, BLOCKS * BLOCK_BYTES)
    pulls = [agent.pull(Pull(peer, 0, part, 0, part, b"part")) for part in parts for agent, _ in all_made]
    last = asyncio.gather(*pulls)
    first_pool = all_made[0][1]
    await asyncio.to_thread(first_pool.wait_for, block, last.done)
    os.kill(os.getpid(), signal.SIGKILL)


def made(name: str, lanes: int) -> tuple[Lanes, WidePool]:
    pool = WidePool(BLOCKS, BLOCK_BYTES)
    agent = Lanes(name, [pool], on_notice=lambda notice: None, expects=lambda: False, count=lanes)
    agent.start()
    return agent, pool


if __name__ == "__main__":
    main(int(sys.argv[1]))
