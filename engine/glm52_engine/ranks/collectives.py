"""What all ranks of a replica do together, over torch.distributed: gloo for tensors on the CPU, NCCL on GPUs.

The process groups are made by their classes and not by `init_process_group`, which knows one rank a process: here every
rank is a thread of its host's process.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

dist: Any = torch.distributed
"""Its classes are not exported for type checkers."""

JOIN_SECONDS = 60.0
"""For all ranks to meet at the store, once every host has said that it is loaded."""

COLLECTIVE_SECONDS = 600.0
"""Only a last resort: a rank that is lost is noticed by its host's silence, a desync by the step numbers."""


class CollectiveError(Exception):
    """A collective did not come about: a rank left, or its connection broke."""


class Collectives(Protocol):
    """Of one rank. Every rank has to call the same ones, in the same order, with tensors of the same shape."""

    rank: int
    world: int

    def all_gather(self, block: torch.Tensor) -> torch.Tensor:
        """[rows, n] of every rank → [world, rows, n], by rank."""
        ...

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """[world, …], part i for rank i → [world, …], part i from rank i."""
        ...

    def gather(self, own: torch.Tensor, everyone: torch.Tensor) -> None:
        """See `model.exchange.Exchange`."""
        ...

    def swap(self, parts: torch.Tensor, back: torch.Tensor) -> None:
        """See `model.exchange.Exchange`."""
        ...

    def abort(self) -> None:
        """From any thread: calls that wait end with an error, here and on the other ranks."""
        ...


def serve_store(host: str) -> Any:
    """Where the ranks of a replica meet, on a free port of the leader; `port` tells which."""
    return dist.TCPStore(host, 0, None, True, timedelta(seconds=JOIN_SECONDS), wait_for_workers=False)


class TorchCollectives:
    """`group` names this life of the replica; `own_host` is the address at which the other ranks reach this one."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        store_host: str,
        store_port: int,
        group: str,
        own_host: str,
        device: torch.device,
    ) -> None:
        """Blocks until every rank is there; raises CollectiveError after JOIN_SECONDS."""
        self.rank, self.world = rank, world
        self._group: Any = None
        self._ending = threading.Lock()
        self._gather, self._swap = dist.distributed_c10d.AllgatherOptions(), dist.distributed_c10d.AllToAllOptions()
        # On the caller's stream: on one of its own a collective would cost a step two events, and its graph branches.
        self._gather.asyncOp = self._swap.asyncOp = False
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread, which is the rank's from now on
        try:
            store = dist.TCPStore(
                store_host, store_port, None, False, timedelta(seconds=JOIN_SECONDS), wait_for_workers=False
            )
            self._group = _group(dist.PrefixStore(group, store), rank, world, own_host, device)
            # No barrier: that of NCCL takes the GPU whose number is the rank's, which on a second host is another one.
            self.all_gather(torch.zeros(1, 1, device=device)).sum().item()
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(f"rank {rank} cannot join the replica's process group: {_line(error)}") from error

    def all_gather(self, block: torch.Tensor) -> torch.Tensor:
        out = block.new_empty(self.world * block.shape[0], *block.shape[1:])
        out = out.unflatten(0, (self.world, -1))
        self.gather(block.contiguous(), out)
        return out

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        parts = parts.contiguous()
        out = torch.empty_like(parts)
        self.swap(parts, out)
        return out

    def gather(self, own: torch.Tensor, everyone: torch.Tensor) -> None:
        self._wait("_allgather_base", everyone.flatten(0, 1), own, self._gather)

    def swap(self, parts: torch.Tensor, back: torch.Tensor) -> None:
        self._wait("alltoall_base", back, parts, [], [], self._swap)

    def abort(self) -> None:
        with self._ending:
            group, self._group = self._group, None
        # Once only: gloo waits for ever the second time.
        if group is not None:
            group.abort()

    def _wait(self, name: str, *tensors: Any) -> None:
        """On a GPU it is the stream that waits, and a graph can hold that."""
        group = self._group
        if group is None:
            raise CollectiveError(f"rank {self.rank} has left the replica's process group")
        try:
            work = getattr(group, name)(*tensors)
            # None where the collective is on the caller's stream already.
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"rank {self.rank}: a collective failed: {_line(error)}") from error


class LateExchange:
    """`model.exchange.Exchange` of a rank that is built before it meets the others: what it needs of the device, and
    whether that suffices, is then known while their hosts still load."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._collectives: Collectives | None = None

    def meet(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def gather(self, own: torch.Tensor, everyone: torch.Tensor) -> None:
        self._met.gather(own, everyone)

    def swap(self, parts: torch.Tensor, back: torch.Tensor) -> None:
        self._met.swap(parts, back)

    @property
    def _met(self) -> Collectives:
        if self._collectives is None:
            raise CollectiveError(f"rank {self.rank} has not met the other ranks yet")
        return self._collectives


def _group(store: Any, rank: int, world: int, own_host: str, device: torch.device) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        group = dist.ProcessGroupNCCL(store, rank, world, options)
        group.eager_connect_single_device(device)
        return group
    options = dist.ProcessGroupGloo._Options()
    # By default gloo resolves the host's name, which in many containers is no address that others reach.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    options._timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    return dist.ProcessGroupGloo(store, rank, world, options)


def _line(error: BaseException) -> str:
    """Without the advice that gloo adds to each of its errors."""
    return " ".join(str(error).split()).partition(". This is typically")[0][:300] or type(error).__name__
