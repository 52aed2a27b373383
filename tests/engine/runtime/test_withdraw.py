"""A request that has no seat yet can be taken back; one that has begun cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from glm52_engine.runtime.record import EngineStopped
from tests.engine.runtime.support import Maker, eventually, greedy


async def test_only_what_waits_is_taken_back(tiny_checkpoint: Path) -> None:
    async with Maker(tiny_checkpoint).running(seats=1) as engine:
        seated = greedy("seated", (1, 2, 3), 4)
        await engine.reserve(seated)
        waits = asyncio.create_task(engine.reserve(greedy("waits", (1, 2, 3), 4)))
        behind = asyncio.create_task(engine.reserve(greedy("behind", (1, 2, 3), 4)))
        await eventually(lambda: engine.stats().waiting == 2)
        assert not engine.withdraw("seated")
        assert not engine.withdraw("unknown")
        assert engine.withdraw("waits")
        with pytest.raises(EngineStopped):
            await waits
        assert not engine.withdraw("waits")
        engine.check_integrity()
        engine.release("seated")
        assert len((await behind).ids) == 1
        engine.release("behind")
        engine.check_integrity()
