"""A short soak; `python -m tests.engine.soak` is the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.local.running import Running
from tests.engine.soak.soak import soak

pytestmark = pytest.mark.processes

SECONDS = 10


@pytest.fixture
def running(tiny_checkpoint: Path) -> Iterator[Running]:
    made = Running("--model", str(tiny_checkpoint))
    try:
        made.says("Ctrl-C ends everything")
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()


async def test_nothing_is_left_and_no_answer_has_changed(running: Running) -> None:
    report = await soak(running, SECONDS, seed=1, say=print)
    assert report.failures() == []
    assert report.probes >= 2
    assert report.prefix_hits > 0
    assert min(report.requests.get(kind, 0) for kind in ("whole", "stream", "leave_stream", "leave_early")) > 0
    assert running.end() == 0
