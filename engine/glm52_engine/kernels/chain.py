"""Programmatic dependent launch: a kernel's programs come up while the last ones of the kernel before still run.

Between sixty short kernels a step would otherwise wait some 1.5 µs at each border. Every kernel of a step begins with
`after_previous`: it reads nothing before, so whatever the kernels before it wrote is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Let the next kernel come up, and wait until everything before this one is written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def for_any(kernel: Any, *numbers: str, alignment: Sequence[str] = ()) -> Any:
    """The same kernel, compiled once for all values of `numbers` and for tensors of any `alignment`.

    For prefill, where these differ with every prompt: a value of 1 and multiples of 16 would each be compiled when the
    first request brings them, which then waits for seconds. Decode's graphs never see another value.
    """
    return triton.jit(kernel.fn, do_not_specialize=numbers, do_not_specialize_on_alignment=alignment)


def _supported() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


CHAINED: dict[str, Any] = {"PDL": True, "launch_pdl": True} if _supported() else {"PDL": False}
"""What every launch of a step passes."""
