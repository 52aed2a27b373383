"""When a prefill pod's agent listens closely."""

from __future__ import annotations

from glm52_engine.runtime.types import Blocks
from glm52_engine.transfer.hold import Holder, TransferCounters, notice
from tests.engine.serve.fakes import FakeEngine


async def test_peers_are_expected_while_something_is_held() -> None:
    holder = Holder(FakeEngine(), TransferCounters())
    assert not holder.expects()
    holder.grant("a", Blocks(0, (1,)), [1, 2])
    holder.grant("b", Blocks(0, (2,)), [1, 2])
    assert holder.expects()
    holder._handed_over(notice("a", 256))
    assert (len(holder), holder.expects()) == (1, True)
    assert holder.give_up("b")
    assert (len(holder), holder.expects()) == (0, False)
