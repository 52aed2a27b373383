"""Fixtures of all engine tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from glm52_engine.checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a `tiny` checkpoint, made once; tests that change it copy it first."""
    out = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint("tiny", out)
    return out


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a `demo` checkpoint, made once: trained weights, whose logits are peaked."""
    out = tmp_path_factory.mktemp("checkpoint") / "demo"
    make_checkpoint("demo", out)
    return out


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices on shared cores: torch's helper threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
