"""KV blocks: their bytes and their owners."""

from glm52_engine.kv.blocks import Allocation, BlockAllocator, BlockError
from glm52_engine.kv.neighbours import runs
from glm52_engine.kv.pools import LAYOUT_VERSION, ROPE_LAYOUT, KvLayout, Pool
from glm52_engine.kv.prefix import following_keys, prefix_chain, prefix_keys

__all__ = [
    "LAYOUT_VERSION",
    "ROPE_LAYOUT",
    "Allocation",
    "BlockAllocator",
    "BlockError",
    "KvLayout",
    "Pool",
    "following_keys",
    "prefix_chain",
    "prefix_keys",
    "runs",
]
