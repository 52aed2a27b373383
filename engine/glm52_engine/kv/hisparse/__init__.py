"""HiSparse: the MLA rows of whole contexts in host memory, those in use in hot buffers where the compute is."""

from glm52_engine.kv.hisparse.hot import MOST_ROWS, HotPool, HotStep, layer_groups

__all__ = ["MOST_ROWS", "HotPool", "HotStep", "layer_groups"]
