from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.runtime.support import Maker


@pytest.fixture(scope="session")
def maker(tiny_checkpoint: Path) -> Maker:
    return Maker(tiny_checkpoint)
