"""A prefill pod's transfer agent in a process of its own: prints its card, then each notice; ends with its stdin."""

from __future__ import annotations

import base64
import json
import sys

from glm52_engine.transfer.agent import TransferAgent
from tests.engine.serve.fakes import FakePool


def main(name: str, blocks: int) -> None:
    pool = FakePool(blocks)
    pool.tensor.bytes[:] = bytes(i * 7 % 251 for i in range(len(pool.tensor.bytes)))

    def say(notice: bytes) -> None:
        print("NOTICE " + notice.decode(), flush=True)

    agent = TransferAgent(name, [pool], on_notice=say, expects=lambda: True)
    agent.start()
    regions = [(region.address, region.num_blocks, region.block_bytes) for region in agent.regions]
    card = {"name": agent.name, "metadata": base64.b64encode(agent.metadata).decode(), "regions": regions}
    print("CARD " + json.dumps(card), flush=True)
    sys.stdin.read()
    agent.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
