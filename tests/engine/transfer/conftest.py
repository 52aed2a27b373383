from __future__ import annotations

import pytest

from glm52_engine.serve import process
from glm52_engine.transfer import parts


@pytest.fixture
def pods_of_lanes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Pods of this test have as many lanes as its parameter says, and divide pulls of any size."""
    count = int(request.param)
    monkeypatch.setattr(process, "chosen_lanes", lambda devices: count)
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    return count


BY_LANES = pytest.mark.parametrize("pods_of_lanes", [1, 3], indirect=True, ids=["one lane", "three lanes"])
