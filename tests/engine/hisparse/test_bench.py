"""The benchmark's selections: consecutive ones overlap as much as it says, which its hit rates rest on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench import hisparse, shapes, steered
from bench.hisparse import SIZES, measure, systems, tiny
from glm52_engine.kv import KvLayout, Pool

CONTEXT = 512


def test_hits_follow_the_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    size = dataclasses.replace(SIZES["tiny"], output=40, rounds=1)
    spec = tiny()
    layout = KvLayout.of(spec, size.block, "bf16")
    memory = torch.zeros(size.pool_tokens // size.block * layout.block_bytes, dtype=torch.uint8)
    steered.fill(Pool(layout, size.pool_tokens // size.block, memory), "cpu")
    weights = shapes.random_tensors(spec, "cpu")
    steered.steer(spec, weights)
    system = systems(size, "cpu", memory, layout, spec, weights)("hisparse")
    try:
        rates = [measure(system, spec, CONTEXT, 6, overlap, size)["hit_rate"] for overlap in (0.5, 0.8, 0.95)]
    finally:
        system.engine.stop()
    # The first of forty steps finds nothing, and an arc of 32 tokens moves by whole ones.
    assert rates == pytest.approx([0.49, 0.78, 0.93], abs=0.04)


def test_the_real_size_can_be_built() -> None:
    """What only a GPU runs: its model's configuration is accepted, and its pool holds its largest case."""
    spec, size = steered.spec(), SIZES["full"]
    assert spec.indexer_types == ("full", "shared", "shared", "shared")
    for context, counts in size.cases:
        assert max(counts) <= size.seats
        assert max(counts) * context <= size.pool_tokens
    assert KvLayout.of(spec, size.block, "bf16").block_bytes * size.pool_tokens // size.block < 64 << 30


def test_what_it_should_reach() -> None:
    row = {"overlap": 0.95, "context": 8192}
    rows = [
        row | {"system": name, "concurrency": count, "tokens_s": rate, "ttft_s": {"p99": wait}}
        for count, rates in ((1, (100, 100, 99)), (128, (1000, 250, 930)))
        for name, rate, wait in zip(hisparse.SYSTEMS, rates, (0.1, 9.0, 0.2), strict=True)
    ]
    found = {entry["name"]: (entry["value"], entry["holds"]) for entry in hisparse.reach(rows)}
    assert found == {
        "small batch, 8,192 × 1": (0.99, True),
        "past the wall, 8,192 × 128": (0.93, True),
        "past the wall, 8,192 × 128, against capped": (3.72, True),
        "time to first token, p99, 8,192 × 128": (0.2, True),
    }
