"""What a run that was killed left in the pod's shared memory, which outlives its container."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

SHARED_MEMORY_PATH = Path("/dev/shm")
PREFIXES = ("nccl-", "torch_", "ucx_shm_", "cuda.shm.")
"""Names under which NCCL, torch, UCX and CUDA make segments; they remove them when they end in order."""


def sweep(folder: Path = SHARED_MEMORY_PATH) -> int:
    """Removes such segments and returns their bytes.

    They count against the limits of the volume and of the pod's memory: a container that is started again and again
    would fail for the sum of its former lives. To be called before anything makes one, and only by the first process of
    a container: elsewhere they may be somebody's.
    """
    freed = 0
    for file in _segments(folder):
        try:
            size = file.stat().st_size
            file.unlink()
        except OSError as error:
            log.warning("a former run's segment stays", extra={"file": str(file), "reason": error.strerror})
        else:
            freed += size
    if freed:
        log.warning("a former run had left shared memory behind", extra={"bytes": freed, "folder": str(folder)})
    return freed


def is_first_process() -> bool:
    """Whether this is the first process of a pod's container."""
    return os.getpid() == 1 and bool(os.environ.get("POD_NAME"))


def _segments(folder: Path) -> list[Path]:
    try:
        return [file for file in folder.iterdir() if file.name.startswith(PREFIXES) and file.is_file()]
    except OSError:
        return []
