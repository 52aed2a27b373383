from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine.serve.deployment import Builder, builder


@pytest_asyncio.fixture
async def build(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> AsyncIterator[Builder]:
    async with builder(monkeypatch, tiny_checkpoint) as made:
        yield made
