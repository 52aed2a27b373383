"""Parts of a rank on a GPU that need no model: copies of blocks, buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.runtime.device.buckets import bucket_sizes
from glm52_engine.runtime.device.mirror import Mirror
from glm52_engine.schedule.launch_ahead import MOST_ROWS


def test_blocks_go_both_ways(device: str) -> None:
    host = torch.arange(60, dtype=torch.uint8).view(6, 10)
    there = torch.zeros(6, 10, dtype=torch.uint8, device=device)
    mirror = Mirror(host.pin_memory() if device == "cuda" else host, there)
    mirror.to_device([4, 1, 2])
    assert there.cpu().any(1).tolist() == [False, True, True, False, True, False]
    assert torch.equal(there.cpu()[[1, 2, 4]], host[[1, 2, 4]])
    there += 100
    mirror.to_host([2])
    mirror.settle()
    assert mirror._host[2].tolist() == list(range(120, 130))
    assert mirror._host[1].tolist() == list(range(10, 20)), "only what was named"


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(6, 10\) and \(6, 12\)"):
        Mirror(torch.zeros(6, 10), torch.zeros(6, 12))


@given(st.integers(1, 4096))
def test_every_count_of_rows_has_a_bucket_that_is_not_twice_as_large(seats: int) -> None:
    sizes = bucket_sizes(seats)
    assert sizes[-1] >= min(seats, MOST_ROWS)
    for rows in {1, seats, MOST_ROWS} if seats >= MOST_ROWS else {1, seats}:
        bucket = next(size for size in sizes if size >= min(rows, MOST_ROWS))
        assert bucket < 2 * min(rows, MOST_ROWS)
