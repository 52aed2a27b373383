from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.model.support import Ours, Theirs


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ours(tiny_checkpoint: Path) -> Ours:
    return Ours(tiny_checkpoint)


@pytest.fixture(scope="session")
def theirs(tiny_checkpoint: Path) -> Theirs:
    return Theirs(tiny_checkpoint)
