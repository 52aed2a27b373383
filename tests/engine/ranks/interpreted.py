"""A process of the product whose ranks run a GPU's code on the CPU: eager steps, kernels in Triton's interpreter, gloo.

    python -m tests.engine.ranks.interpreted '{"most_rows": 2}' MODULE ARG…

Its configuration says `accelerator: nvidia`. Nothing else of the product knows: what it asks of GPUs is answered here.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tests.engine.kernels.conftest  # noqa: F401  # it prepares the interpreter, before any kernel is imported
from glm52_engine.hardware.health import Reason, Verdict
from glm52_engine.kv.pools import KvLayout, Pool
from glm52_engine.ranks import process
from glm52_engine.runtime import load
from glm52_engine.runtime.device import gpus
from glm52_engine.runtime.device.buckets import Bucket
from glm52_engine.schedule import launch_ahead
from glm52_engine.sizing import GIB

BLOCKS = 48
STEP_TOKENS = 12
"""Most rows of a step: a prompt takes several."""


@dataclass(frozen=True)
class Faults:
    """`most_rows`: of the largest graph. `full`: the GPU of this rank has no room for graphs. `free_gib`: of every GPU,
    before anything is put there beside the weights. `lost`: once this file is there, the first GPU is lost."""

    most_rows: int = launch_ahead.MOST_ROWS
    full: int | None = None
    free_gib: int = 60
    lost: str = ""


class Pinned:
    seconds = 0.25

    def release(self) -> float:
        return 0.0


def prepare(faults: Faults) -> None:
    launch_ahead.MOST_ROWS = faults.most_rows
    load.STEP_TOKENS["nvidia"] = STEP_TOKENS
    # Float32 throughout: bfloat16's rounding differs with the order of sums, and so do tokens.
    load._stored_as = lambda dtype, accelerator: dtype  # type: ignore[assignment]
    load.pool_blocks = lambda size, *, block_bytes: BLOCKS  # type: ignore[assignment, attr-defined]
    replaced: dict[str, Any] = {
        "narrow": lambda weights: None,
        "device": lambda rank: "cpu",
        "check_count": lambda ranks: None,
        "pinned_pool": pinned_pool,
    }
    for name, function in replaced.items():
        assert hasattr(gpus, name)
        setattr(gpus, name, function)
    torch.cuda.mem_get_info = lambda device=None: (faults.free_gib * GIB, 80 * GIB)
    take_turns()
    if faults.full is not None:
        fill(faults.full)
    if faults.lost:
        process.watch_gpus = lambda ranks, told, *, first_rank: lose(Path(faults.lost), told, first_rank)  # type: ignore[assignment]


def pinned_pool(rank: int, kv: KvLayout, blocks: int, on_progress: Any) -> tuple[Pool, Pinned]:
    pool = Pool(kv, blocks)
    pool.touch()
    return pool, Pinned()


def take_turns() -> None:
    """The interpreter has one state: ranks of one process run one kernel after the other, and wait apart."""
    from triton.runtime.interpreter import InterpretedFunction

    turn, run = threading.Lock(), InterpretedFunction.run

    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with turn:
            return run(self, *args, **kwargs)

    InterpretedFunction.run = alone


def lose(file: Path, told: Callable[[Verdict], None], rank: int) -> None:
    def watch() -> None:
        while not file.exists():
            threading.Event().wait(0.05)
        told(Verdict(Reason.LOST, True, "GPU-1: the GPU fell off the bus", rank))

    threading.Thread(target=watch, daemon=True).start()


def fill(rank: int) -> None:
    """Its graphs are asked for last of all: the others wait in their collectives meanwhile."""
    capture = Bucket.capture
    threads: set[str] = set()

    def full(self: Bucket, pool: Any, *, whole: bool = False) -> Any:
        name = threading.current_thread().name
        if name == f"rank-{rank}" and name in threads:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity …")
        threads.add(name)
        return capture(self, pool, whole=whole)

    Bucket.capture = full  # type: ignore[method-assign]


if __name__ == "__main__":
    prepare(Faults(**json.loads(sys.argv[1])))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
