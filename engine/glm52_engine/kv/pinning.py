"""Host memory for KV: taken in large pages, touched by many threads beside the GPU, and pinned for it.

A page gets its memory when it is first touched, on the NUMA node of the core that touches it. One thread does a GiB in
half a second, so a pool of hundreds would take minutes; many threads, on the cores of the GPU's node, share the work.
Pinning pages that are there takes a fraction of that, and is one call: of a slab that was registered in pieces, kernels
can reach only the first, since the pieces' addresses on the device need not follow each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from glm52_engine.config import ConfigError
from glm52_engine.sizing import gib

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
"""Touched by one thread at a time: what must end before a TERM is heeded, a fraction of a second; small enough that the
threads end together."""

MOST_THREADS = 32
"""Beyond them memory, not threads, is the limit."""

_LARGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23
_REGISTER_FLAGS = 1 | 2  # portable: any GPU's context; mapped: kernels read it
_IPC_LOCK = 14
"""The capability that exempts from the memlock limit (linux/capability.h)."""

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all. What it raises ends the work, which then undoes itself."""


def host_slab(size: int) -> torch.Tensor:
    """uint8 [size] of fresh zeros, on large pages where the kernel has them; no page has memory before it is touched.

    Private and at a border of large pages: memory that could be shared counts as shared memory, and pieces of a tensor
    from the allocator would not begin at a page.
    """
    region = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    skip = -whole.data_ptr() % _LARGE_PAGE
    return whole[skip : skip + size]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slab is to lie: cores of the NUMA node, empty when nothing is known or allowed."""

    node: int | None = None
    cores: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return "any NUMA node" if self.node is None else f"NUMA node {self.node}"


def place_of(pci: str, *, sysfs: Path = Path("/sys")) -> Place:
    """The node of a PCI device such as `0000:1b:00.0`, with its cores that this process may use."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
        cores = _cores((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return Place()
    allowed = cores & os.sched_getaffinity(0)
    if node < 0 or not allowed:
        return Place()
    return Place(node, frozenset(allowed))


def gpu_place(index: int) -> Place:
    """See `place_of`; the GPU by torch's number."""
    known: Any = torch.cuda.get_device_properties(index)
    if not hasattr(known, "pci_domain_id"):  # a PyTorch that does not say
        return Place()
    return place_of(f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0")


def touch(slab: torch.Tensor, *, place: Place = Place(), on_progress: Progress = lambda done, total: None) -> None:
    """Give every page of a fresh slab its memory. Raises ConfigError when there is none left."""
    _Pieces(slab, place, on_progress).work(_populate)


class Driver(Protocol):
    """Pins and unpins [address, address + size); 0 or the driver's error code."""

    def register(self, address: int, size: int) -> int: ...

    def unregister(self, address: int) -> int: ...


class Cuda:
    """`Driver` of one GPU, by torch's number."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, size: int) -> int:
        torch.cuda.set_device(self._index)  # of this thread
        return int(self._runtime.cudaHostRegister(address, size, _REGISTER_FLAGS))

    def unregister(self, address: int) -> int:
        return int(self._runtime.cudaHostUnregister(address))


@dataclass
class Pinned:
    """A slab that a GPU may read and write. `seconds`: what touching and pinning took."""

    slab: torch.Tensor
    seconds: float
    _driver: Driver
    _released: bool = False

    @property
    def size(self) -> int:
        return self.slab.nbytes

    def release(self) -> float:
        """Unpin, in this process and before it ends: the kernel would do it for a killed one, deaf to every signal.

        Returns seconds. A second time does nothing. Nobody may use the slab any more.
        """
        if self._released:
            return 0.0
        self._released = True
        began = time.monotonic()
        code = self._driver.unregister(self.slab.data_ptr())
        seconds = time.monotonic() - began
        if code:
            log.error("%s were not unpinned: the driver's error is %d", gib(self.size), code)
        else:
            log.info("unpinned %s in %.2f s", gib(self.size), seconds)
        return seconds


def pin(
    slab: torch.Tensor, driver: Driver, *, place: Place = Place(), on_progress: Progress = lambda done, total: None
) -> Pinned:
    """Touch and pin a fresh slab. Raises ConfigError when it cannot be; it is then as unpinned as before."""
    began = time.monotonic()
    touch(slab, place=place, on_progress=on_progress)
    touched = time.monotonic() - began
    code = driver.register(slab.data_ptr(), slab.nbytes)
    if code:
        raise ConfigError(
            f"host_pool_gib: {gib(slab.nbytes)} cannot be pinned: the driver's error is {code}: raise the container's "
            "memlock limit (ulimit -l) and its memory limit, or lower host_pool_gib"
        )
    pinned = Pinned(slab, time.monotonic() - began, driver)
    log.info("pinned %s on %s in %.2f s, of which %.2f s to touch it", gib(slab.nbytes), place, pinned.seconds, touched)
    return pinned


def check_memlock(size: int, *, status: Path = Path("/proc/self/status")) -> None:
    """Raises ConfigError unless `size` bytes may be locked; the soft limit is raised as far as that takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= size or _has_capability(status, _IPC_LOCK):
        return
    if hard == resource.RLIM_INFINITY or hard >= size:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        return
    raise ConfigError(
        f"host_pool_gib: this pod pins {gib(size)}, but may lock {gib(hard)} (ulimit -l): raise the memlock limit of "
        "the node's container runtime (LimitMEMLOCK=infinity in its systemd unit), add the capability IPC_LOCK, or "
        "lower host_pool_gib"
    )


class _Pieces:
    """A slab cut into pieces, and threads that take one after the other."""

    def __init__(self, slab: torch.Tensor, place: Place, on_progress: Progress) -> None:
        self._step = PIECE_BYTES
        self._base, self._total = slab.data_ptr(), slab.nbytes
        self._place, self._on_progress = place, on_progress
        self._next = self._done = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def work(self, do: Callable[[int, int], None]) -> None:
        """`do(address, size)` for every piece. The first failure, or what `on_progress` raises, ends it."""
        cores = self._place.cores or os.sched_getaffinity(0)
        count = min(len(cores), MOST_THREADS, -(-self._total // self._step))
        threads = [threading.Thread(target=self._run, args=(do,), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            self._report()
        except BaseException as error:
            self._stop(error)
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _report(self) -> None:
        """On the caller's thread, whose `on_progress` it is."""
        told = 0
        while told < self._total:
            with self._changed:
                while self._failure is None and self._done == told:
                    self._changed.wait()
                if self._failure is not None:
                    return
                told = self._done
            self._on_progress(told, self._total)

    def _run(self, do: Callable[[int, int], None]) -> None:
        try:
            if self._place.cores:
                os.sched_setaffinity(0, self._place.cores)  # of this thread
            while (piece := self._take()) is not None:
                do(self._base + piece[0], piece[1])
                with self._changed:
                    self._done += piece[1]
                    self._changed.notify()
        except BaseException as error:
            self._stop(error)

    def _take(self) -> tuple[int, int] | None:
        with self._changed:
            start = self._next
            if self._failure is not None or start >= self._total:
                return None
            self._next = min(self._total, start + self._step)
            return start, self._next - start

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify()


def _populate(address: int, size: int) -> None:
    """Memory for the pages of a fresh mapping. The calls let go of Python's lock."""
    start = address - address % mmap.PAGESIZE
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EINVAL:  # before Linux 5.14
        ctypes.memset(address, 0, size)
    else:
        raise ConfigError(
            f"host_pool_gib: no memory for {gib(size)} of the pool ({os.strerror(code)}): raise the pod's memory "
            "limit, or lower host_pool_gib"
        )


def _has_capability(status: Path, number: int) -> bool:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("CapEff:") and int(line.split()[1], 16) >> number & 1 for line in lines)


def _cores(text: str) -> set[int]:
    """`0-3,8` → {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


_libc = ctypes.CDLL(None, use_errno=True)
