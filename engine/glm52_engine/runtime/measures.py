"""What a rank's engine will be like, known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from glm52_engine.checkpoint import ModelSpec
from glm52_engine.kv.pools import KvLayout
from glm52_engine.runtime.rank import StepLimits
from glm52_engine.schedule import Limits


@dataclass(frozen=True, slots=True)
class Measures:
    """What a rank's engine will be like, known from the checkpoint's small files: nothing is loaded for it."""

    spec: ModelSpec
    kv: KvLayout
    limits: Limits
    step: StepLimits
    hot_rows: int | None
    """Managed rows of a hot buffer; None without HiSparse."""
    hot_always: bool = False
    """Whether contexts never lie whole beside the compute, also where they would fit."""
