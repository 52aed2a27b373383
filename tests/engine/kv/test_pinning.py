"""Touching and pinning without a GPU: the driver is a dict of ranges."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
from pathlib import Path

import pytest

from glm52_engine.config import ConfigError
from glm52_engine.kv import pinning
from glm52_engine.kv.pinning import Place, check_memlock, host_slab, pin, place_of, touch

PAGE = mmap.PAGESIZE


class Ranges:
    """A driver that refuses with `code` if that is not 0; what is registered must have its memory."""

    def __init__(self, code: int = 0) -> None:
        self.held: dict[int, int] = {}
        self._code = code

    def register(self, address: int, size: int) -> int:
        assert resident_pages(address) >= size // PAGE
        if not self._code:
            self.held[address] = size
        return self._code

    def unregister(self, address: int) -> int:
        del self.held[address]
        return 0


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4 * PAGE)


def resident_pages(start: int) -> int:
    """Of the mapping that holds this address, in pages, as the kernel counts them."""
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
    assert resident_pages(slab.data_ptr()) >= 38
    assert seen == sorted(set(seen))
    assert seen[-1] == 100
    assert not slab.any()


def test_a_kernel_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "_MADV_POPULATE_WRITE", 9999)
    slab = host_slab(9 * PAGE)
    touch(slab)
    assert resident_pages(slab.data_ptr()) >= 9


def test_without_memory_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(pinning._libc, "madvise", none_left)
    with pytest.raises(ConfigError, match=r"no memory for .* of the pool \(Cannot allocate memory\)"):
        touch(host_slab(40 * PAGE))


def test_pinned_whole_and_let_go_once() -> None:
    driver, slab = Ranges(), host_slab(40 * PAGE)
    pinned = pin(slab, driver)
    assert driver.held == {slab.data_ptr(): slab.nbytes}
    assert (pinned.size, pinned.seconds > 0) == (slab.nbytes, True)
    pinned.release()
    assert driver.held == {}
    assert pinned.release() == 0


def test_a_refusal_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"host_pool_gib: .* cannot be pinned: .* error is 2: raise .*memlock"):
        pin(host_slab(40 * PAGE), Ranges(code=2))


def test_what_progress_raises_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TERM during a start: whoever is told of the progress has been told to leave. No more than the pieces in hand
    are waited for."""
    monkeypatch.setattr(pinning, "MOST_THREADS", 2)
    driver, left, touched = Ranges(), threading.Event(), []

    def populate(address: int, size: int) -> None:
        touched.append(address)
        if len(touched) > 2:
            left.wait(30)  # until progress has been heard of

    def leave(done: int, total: int) -> None:
        left.set()
        raise InterruptedError

    monkeypatch.setattr(pinning, "_populate", populate)
    with pytest.raises(InterruptedError):
        pin(host_slab(400 * PAGE), driver, on_progress=leave)
    assert len(touched) <= 8
    assert driver.held == {}


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
    pieces = pinning._Pieces(host_slab(40 * PAGE), Place(0, one), lambda done, total: None)
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
