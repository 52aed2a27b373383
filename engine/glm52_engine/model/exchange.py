"""What a device's step asks of the other ranks of its replica, over which the routed experts are spread.

Every rank has its own rows and its own experts. A layer's rows go to all ranks with what was decided for them; each
rank computes what its experts add to them, and sends every rank the sums of that rank's rows back.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Exchange(Protocol):
    """The two collectives of a layer. All ranks call them in the same order with tensors of the same shape and type.

    They go to the current stream, take no memory and never wait for the device, so that a CUDA graph can hold them.
    """

    rank: int
    world: int

    def gather(self, own: torch.Tensor, everyone: torch.Tensor) -> None:
        """`own` [n, …] of every rank into `everyone` [world, n, …], by rank; both contiguous."""
        ...

    def swap(self, parts: torch.Tensor, back: torch.Tensor) -> None:
        """`parts` [world, n, …], part i for rank i, into `back` [world, n, …], part i from rank i; both contiguous."""
        ...


def check_experts(held: range, experts: int, exchange: Exchange | None) -> None:
    """Raises ValueError where nobody would compute the experts that this rank does not hold, or several would."""
    if exchange is None and held != range(experts):
        raise ValueError(
            f"weights of experts {held.start} to {held.stop - 1}, expected all {experts}: a rank without an exchange "
            "computes alone; give it the exchange of its replica, or load all experts"
        )
    if exchange is not None and len(held) > -(-experts // exchange.world):
        raise ValueError(
            f"rank {exchange.rank} of {exchange.world}: weights of {len(held)} of {experts} experts, expected its own "
            "share: what several ranks hold would be added several times; load with experts=…"
        )
