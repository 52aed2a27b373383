"""Fixtures of all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm52_engine.checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a `tiny` checkpoint, made once; tests that change it copy it first."""
    out = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint("tiny", out)
    return out
