from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.model.support import Ours, Theirs


@pytest.fixture
def ours(tiny_checkpoint: Path) -> Ours:
    return Ours(tiny_checkpoint)


@pytest.fixture(scope="session")
def theirs(tiny_checkpoint: Path) -> Theirs:
    return Theirs(tiny_checkpoint)
