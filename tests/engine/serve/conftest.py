from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine.serve.deployment import Builder, Deployment, builder
from tests.engine.serve.fakes import FakeEngine


@pytest_asyncio.fixture
async def build(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> AsyncIterator[Builder]:
    async with builder(monkeypatch, tiny_checkpoint) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deployed(tiny_checkpoint: Path) -> AsyncIterator[Deployment]:
    """One prefill and one decode pod with fake engines, for all tests of a file."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        async with builder(monkeypatch, tiny_checkpoint) as build:
            yield await build.deployment([FakeEngine()], [FakeEngine()])
