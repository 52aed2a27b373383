"""KV blocks: their bytes and their owners."""

from glm52_engine.kv.blocks import BlockAllocator, BlockError
from glm52_engine.kv.pools import LAYOUT_VERSION, ROPE_LAYOUT, KvLayout, Pool

__all__ = ["LAYOUT_VERSION", "ROPE_LAYOUT", "BlockAllocator", "BlockError", "KvLayout", "Pool"]
