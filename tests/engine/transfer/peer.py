"""A prefill pod's transfer agent in a process of its own: prints its card, then each notice; ends with its stdin.

With a third argument that is not 0 its blocks have so many bytes, as in a `WidePool`; a fourth says how many lanes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from glm52_engine.transfer.lanes import Lanes
from glm52_engine.transfer.peers import agent_card
from tests.engine.serve.fakes import FakePool, Memory


class WidePool(FakePool):
    """Few blocks of many bytes, each full of one byte."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__(num_blocks)
        self.block_bytes = block_bytes
        self.tensor = Memory(num_blocks * block_bytes)

    def fill(self) -> None:
        for block in range(self.num_blocks):
            ctypes.memset(self.tensor.data_ptr() + block * self.block_bytes, self.byte(block), self.block_bytes)

    @staticmethod
    def byte(block: int) -> int:
        return block % 250 + 1

    def holds(self, block: int, byte: int) -> bool:
        at = block * self.block_bytes
        return bytes(self.tensor.bytes[at : at + self.block_bytes]) == bytes([byte]) * self.block_bytes

    def wait_for(self, block: int, over: Callable[[], bool]) -> None:
        """Until a byte of it is there, or `over`: looks without a pause."""
        while not over() and not self.tensor.bytes[block * self.block_bytes]:
            pass


def main(name: str, blocks: int, block_bytes: int, lanes: int) -> None:
    if block_bytes:
        wide = WidePool(blocks, block_bytes)
        wide.fill()
        pool: FakePool = wide
    else:
        pool = FakePool(blocks)
        pool.tensor.bytes[:] = bytes(i * 7 % 251 for i in range(len(pool.tensor.bytes)))

    def say(notice: bytes) -> None:
        print("NOTICE " + notice.decode(), flush=True)

    agent = Lanes(name, [pool], on_notice=say, expects=lambda: True, count=lanes)
    agent.start()
    print("CARD " + agent_card(agent.described).model_dump_json(), flush=True)
    sys.stdin.read()
    agent.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
