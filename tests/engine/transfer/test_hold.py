"""How long a prefill pod's agent has to make progress."""

from __future__ import annotations

from glm52_engine.runtime.types import Blocks
from glm52_engine.transfer.agent import LINGER_SECONDS
from glm52_engine.transfer.hold import Holder, TransferCounters, notice
from tests.engine.serve.fakes import FakeEngine


async def test_a_peer_that_has_begun_to_read_what_is_given_up_can_end() -> None:
    now = [100.0]
    holder = Holder(FakeEngine(), TransferCounters(), clock=lambda: now[0])
    assert not holder.expects()
    holder.grant("a", Blocks(0, (1,)), [1, 2])
    assert holder.expects()
    assert holder.give_up("a")
    assert (len(holder), holder.expects()) == (0, True)
    now[0] += LINGER_SECONDS
    assert not holder.expects()


async def test_what_was_read_is_waited_for_no_more() -> None:
    holder = Holder(FakeEngine(), TransferCounters())
    holder.grant("a", Blocks(0, (1,)), [1, 2])
    holder._handed_over(notice("a", 256))
    assert (len(holder), holder.expects()) == (0, False)
