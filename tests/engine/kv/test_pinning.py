"""Touching and pinning without a GPU: the driver is a set of ranges that refuses what a real one refuses."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import resource
import threading
from pathlib import Path

import pytest
import torch

from glm52_engine.config import ConfigError
from glm52_engine.kv import pinning
from glm52_engine.kv.pinning import Place, check_memlock, host_slab, pin, place_of, touch

PAGE = mmap.PAGESIZE


class Ranges:
    """Registrations by address; refuses the call number `refuse`, and ranges that share a page."""

    def __init__(self, refuse: int = -1) -> None:
        self.held: dict[int, int] = {}
        self.seen: list[tuple[int, int]] = []
        self._refuse = refuse
        self._lock = threading.Lock()

    def register(self, address: int, size: int) -> int:
        with self._lock:
            self.seen.append((address, size))
            pages = set(range(address // PAGE, -(-(address + size) // PAGE)))
            shared = any(pages & set(range(a // PAGE, -(-(a + s) // PAGE))) for a, s in self.held.items())
            if shared or len(self.seen) == self._refuse:
                return 712 if shared else 2
            self.held[address] = size
            return 0

    def unregister(self, address: int) -> int:
        with self._lock:
            del self.held[address]
            return 0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4 * PAGE)


def resident_pages(slab: torch.Tensor) -> int:
    """Of the mapping that holds the slab, in pages, as the kernel counts them."""
    start = slab.data_ptr()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= start < high
        elif inside and first == "Rss:":
            return int(line.split()[1]) * 1024 // PAGE
    raise AssertionError("the slab is not mapped")


def test_every_page_is_touched_and_every_byte_zero() -> None:
    slab = host_slab(37 * PAGE + 100)
    seen: list[int] = []
    touch(slab, on_progress=lambda done, total: seen.append(done * 100 // total))
    assert resident_pages(slab) >= 38
    assert seen == sorted(set(seen))
    assert seen[-1] == 100
    assert not slab.any()


def test_a_kernel_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "_MADV_POPULATE_WRITE", 9999)
    slab = host_slab(9 * PAGE)
    touch(slab)
    assert resident_pages(slab) >= 9


def test_without_memory_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(pinning._libc, "madvise", none_left)
    with pytest.raises(ConfigError, match=r"no memory for .* of the pool \(Cannot allocate memory\)"):
        touch(host_slab(40 * PAGE))


@pytest.mark.parametrize("unit", [1, 3 * PAGE // 2, 7])
def test_pieces_meet_and_never_cut_a_block(unit: int) -> None:
    driver = Ranges()
    slab = host_slab(40 * PAGE)
    pinned = pin(slab, driver, unit=unit)
    ranges = sorted(driver.held.items())
    assert ranges[0][0] == slab.data_ptr()
    assert sum(ranges[-1]) == slab.data_ptr() + slab.nbytes
    for (start, size), (following, _) in itertools.pairwise(ranges):
        assert start + size == following
        assert (following - slab.data_ptr()) % unit == 0
    assert pinned.size == slab.nbytes
    pinned.release()
    assert driver.held == {}
    assert pinned.release() < 1


def test_a_refusal_names_the_remedy_and_leaves_nothing_pinned() -> None:
    driver = Ranges(refuse=3)
    with pytest.raises(ConfigError, match=r"host_pool_gib: .* cannot be pinned: .* with error 2: raise .*memlock"):
        pin(host_slab(40 * PAGE), driver, unit=1)
    assert driver.held == {}


def test_what_progress_raises_ends_it_and_leaves_nothing_pinned() -> None:
    """A TERM during a start: whoever is told of the progress has been told to leave."""
    driver, slab = Ranges(), host_slab(400 * PAGE)

    def leave(done: int, total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        pin(slab, driver, unit=1, on_progress=leave)
    assert driver.held == {}


def test_a_stop_waits_for_no_more_than_the_pieces_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "MOST_THREADS", 2)
    left = threading.Event()
    driver = Ranges()
    plain = driver.register

    def register(address: int, size: int) -> int:
        code = plain(address, size)
        if len(driver.seen) > 2:
            left.wait(30)  # the third piece takes until progress has been heard of
        return code

    def leave(done: int, total: int) -> None:
        left.set()
        raise InterruptedError

    monkeypatch.setattr(driver, "register", register)
    with pytest.raises(InterruptedError):
        pin(host_slab(400 * PAGE), driver, unit=1, on_progress=leave)
    assert len(driver.seen) <= 8


def test_cores_of_a_gpus_node(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    node = tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    node.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    mine = min(os.sched_getaffinity(0))
    (node / "cpulist").write_text(f"{mine},4000-4003\n")
    assert place_of("0000:1B:00.0", sysfs=tmp_path) == Place(1, frozenset({mine}))
    assert str(place_of("0000:1b:00.0", sysfs=tmp_path)) == "NUMA node 1"
    (node / "cpulist").write_text("4000-4003\n")
    assert place_of("0000:1b:00.0", sysfs=tmp_path) == Place()
    (device / "numa_node").write_text("-1\n")
    assert place_of("0000:1b:00.0", sysfs=tmp_path) == Place()
    assert place_of("0000:ff:00.0", sysfs=tmp_path) == Place()


def test_threads_are_bound_to_the_place_and_the_caller_is_not() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    seen: list[frozenset[int]] = []
    pieces = pinning._Pieces(host_slab(40 * PAGE), 1, Place(0, one), lambda done, total: None)
    pieces.work(lambda address, size: seen.append(frozenset(os.sched_getaffinity(0))))
    assert set(seen) == {one}
    assert os.sched_getaffinity(0) == before


def limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: raised.append(pair))
    return raised


def test_memlock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    assert limits(monkeypatch, 8 << 20, 8 << 20) == []
    with pytest.raises(ConfigError, match=r"pins 4 GiB, but may lock 0\.01 GiB .*LimitMEMLOCK=infinity"):
        check_memlock(4 << 30, status=status)
    check_memlock(8 << 20, status=status)
    raised = limits(monkeypatch, 8 << 20, 8 << 30)
    check_memlock(4 << 30, status=status)
    assert raised == [(8 << 30, 8 << 30)]
    limits(monkeypatch, 0, 0)
    status.write_text("CapEff:\t0000000000004000\n")
    check_memlock(4 << 30, status=status)
    limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    check_memlock(4 << 30, status=tmp_path / "none")
