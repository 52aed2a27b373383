"""HiSparse: the MLA rows of whole contexts in host memory, those in use in hot buffers where the compute is."""

from glm52_engine.kv.hisparse.hot import HotPool, HotStep, layer_groups

__all__ = ["HotPool", "HotStep", "layer_groups"]
