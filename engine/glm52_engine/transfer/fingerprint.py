"""What a prefill and a decode pod must agree on, field by field, before one byte of KV is moved."""

from __future__ import annotations

from collections.abc import Mapping

from glm52_engine.runtime.types import Engine

Fingerprint = dict[str, str | int]


def fingerprint(engine: Engine) -> Fingerprint:
    """The engine's layout and the geometry of its pools (the number of blocks may differ, their shape may not)."""
    pool = engine.pools[0]
    return {**engine.layout, "pool_block_bytes": pool.block_bytes, "pool_block_size": pool.block_size}


def difference(ours: Mapping[str, str | int], theirs: Mapping[str, str | int]) -> str:
    """Empty when equal; else each differing field with both values."""
    fields = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return "; ".join(f"{name}: decode has {ours.get(name)!r}, prefill has {theirs.get(name)!r}" for name in fields)
