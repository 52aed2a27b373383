"""A GPU whose memory does not suffice says what it was for, and what to lower."""

from __future__ import annotations

import pytest
import torch

from glm52_engine.config import ConfigError
from glm52_engine.runtime.device.room import Room
from glm52_engine.sizing import GIB


class Gpu:
    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self) -> tuple[int, int]:
        return self.free * GIB, 80 * GIB


def test_each_part_is_counted_as_it_is_taken() -> None:
    gpu = Gpu(30)
    room = Room(2, gpu)
    with room.taking("workspace", of_it=("KV", 16 * GIB)):
        gpu.free -= 18
    with room.taking("graphs"):
        gpu.free -= 1
    assert str(room) == "50 GiB weights + 16 GiB KV + 2 GiB workspace + 1 GiB graphs"


def test_memory_that_runs_out_is_told_in_figures_and_with_what_to_lower() -> None:
    gpu = Gpu(12)
    room = Room(1, gpu)
    with room.taking("workspace", of_it=("KV", 8 * GIB)):
        gpu.free -= 11
    with pytest.raises(ConfigError) as refused, room.taking("graphs"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 1 has a total capacity of …")
    said = str(refused.value)
    assert said.startswith(
        "rank 1: the 80 GiB of its GPU do not hold 68 GiB weights + 8 GiB KV + 3 GiB workspace, and then graphs: "
        "3.00 GiB more were asked for: lower host_pool_gib"
    )
    assert "max_num_seqs" in said


def test_kv_that_does_not_fit_is_named_with_its_size() -> None:
    room = Room(0, Gpu(4))
    with (
        pytest.raises(ConfigError, match=r"76 GiB weights, and then workspace \(of which 8 GiB KV\): lower"),
        room.taking("workspace", of_it=("KV", 8 * GIB)),
    ):
        raise torch.OutOfMemoryError("CUDA error: out of memory")


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="illegal"), Room(0, Gpu(4)).taking("graphs"):
        raise RuntimeError("an illegal memory access was encountered")
