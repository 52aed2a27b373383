"""Kernels that are compiled while requests wait: told in the log, where nothing else says why they waited."""

from __future__ import annotations

import logging
from typing import Any

import torch

log = logging.getLogger(__name__)


class Late:
    """What Triton calls behind every compilation; `then` is whoever was to be called before.

    A kernel is told once, however often it is compiled, and only on devices in `ready`: others of the process may still
    be starting.
    """

    def __init__(self, then: Any = None) -> None:
        self.ready: set[int] = set()
        self._then = then
        self._told: set[str] = set()

    def __call__(self, **given: Any) -> Any:
        name = given["fn"].name
        if given["compile"]["device"] in self.ready and name not in self._told:
            self._told.add(name)
            log.warning(
                "kernel %s was compiled after the start, and requests waited for it: %s", name, given.get("repr", "")
            )
        return None if self._then is None else self._then(**given)


def watch(device: torch.device) -> None:
    """From now on nothing should be compiled for this GPU."""
    from triton import knobs

    hook = knobs.runtime.jit_post_compile_hook
    if not isinstance(hook, Late):
        knobs.runtime.jit_post_compile_hook = hook = Late(hook)
    hook.ready.add(torch.cuda.current_device() if device.index is None else device.index)
