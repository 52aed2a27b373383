"""GPUs as NVML tells of them. There is none here: NVML's functions are replaced, its module and its errors are real."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from glm52_engine.config import ConfigError
from glm52_engine.hardware.health import Reason, Verdict, judge_xid
from glm52_engine.hardware.inventory import Gpu, describe, for_ranks, visible
from glm52_engine.hardware.nvml import HealthWatch, open_nvml, read_inventory, watch_gpus

SECONDS = 20.0
GIB = 1 << 30


def gpu(index: int) -> Gpu:
    return Gpu(index, f"GPU-{index}abc", "NVIDIA H200", f"00000000:0{index}:00.0", 141 * GIB, 140 * GIB, index // 2)


GPUS = [gpu(index) for index in range(4)]


class Fake:
    """NVML of a machine with GPUS; `events` are handed out one by one, an exception is raised."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.lost: set[int] = set()
        self.registered: dict[int, int] = {}
        self.freed = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        functions = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: len(GPUS),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: GPUS[handle].uuid.encode(),
            "nvmlDeviceGetName": lambda handle: GPUS[handle].name,
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=GPUS[handle].bus),
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetSupportedEventTypes": self._supported,
            "nvmlDeviceRegisterEvents": self._register,
            "nvmlEventSetCreate": lambda: "events",
            "nvmlEventSetWait_v2": self._wait,
            "nvmlEventSetFree": self._free,
        }
        for name, function in functions.items():
            patch.setattr(pynvml, name, function)

    def happen(self, index: int, kind: int, code: int = 0) -> None:
        self.events.put(SimpleNamespace(device=index, eventType=kind, eventData=code))

    def _memory(self, handle: int) -> Any:
        if handle in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(total=GPUS[handle].memory, free=GPUS[handle].free)

    def _supported(self, handle: int) -> int:
        if handle == 3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError)

    def _register(self, handle: int, kinds: int, events: str) -> None:
        self.registered[handle] = kinds

    def _wait(self, events: str, milliseconds: int) -> Any:
        try:
            event = self.events.get(timeout=0.01)
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        if isinstance(event, Exception):
            raise event
        return event

    def _free(self, events: str) -> None:
        self.freed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    made.install(monkeypatch)
    return made


@pytest.fixture
def verdicts(fake: Fake) -> Iterator[queue.SimpleQueue[Verdict]]:
    """What a watch over ranks 8 to 11 tells."""
    told: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    watch = HealthWatch(pynvml, GPUS, 8, told.put)
    watch.start()
    yield told
    watch.stop()
    assert fake.freed


def test_the_inventory_names_every_gpu_and_its_numa_node(fake: Fake, tmp_path: Path) -> None:
    for index, node in ((0, "0"), (1, "0"), (2, "1"), (3, "-1")):
        place = tmp_path / f"bus/pci/devices/0000:0{index}:00.0"
        place.mkdir(parents=True)
        (place / "numa_node").write_text(node + "\n")
    found = read_inventory(open_nvml(), tmp_path)
    assert [each.uuid for each in found] == [each.uuid for each in GPUS]
    assert [each.numa for each in found] == [0, 0, 1, None]
    assert "rank 5: NVIDIA H200 GPU-2abc at 00000000:02:00.0, NUMA node 1, 140 GiB of 141 GiB" in describe(found[2], 5)


def test_without_a_driver_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    with pytest.raises(ConfigError, match=r"accelerator: found nvidia.*nvidia.com/gpu"):
        open_nvml()


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        ("GPU-1abc", [1]),
        ("0, GPU-3", [0, 3]),
        ("1,9,2", [1]),
        ("1,1", [1]),
        ("GPU-", []),
    ],
)
def test_what_cuda_hides_is_no_rank_s(devices: str | None, indices: list[int]) -> None:
    assert [each.index for each in visible(GPUS, devices)] == indices


def test_too_few_gpus_are_refused_with_their_names() -> None:
    assert for_ranks(GPUS, 3) == GPUS[:3]
    with pytest.raises(ConfigError, match=r"ranks_per_host: found 3, but this pod sees 2 GPUs .*GPU-0abc.*GPU-1abc"):
        for_ranks(GPUS[:2], 3)


@pytest.mark.parametrize(
    ("code", "reason", "fatal"),
    [
        (79, Reason.LOST, True),
        (48, Reason.ECC, True),
        (63, Reason.ECC, False),
        (94, Reason.ECC, True),
        (74, Reason.LINK, True),
        (31, Reason.XID, True),
        (9999, Reason.XID, True),
    ],
)
def test_an_xid_has_a_name_and_a_remedy(code: int, reason: Reason, fatal: bool) -> None:
    verdict = judge_xid(GPUS[1], 9, code)
    assert (verdict.reason, verdict.fatal, verdict.rank) == (reason, fatal, 9)
    assert verdict.text.startswith(f"{reason}: GPU 1 (GPU-1abc, 00000000:01:00.0) of rank 9: Xid {code}, ")


def test_events_are_told_with_their_rank(fake: Fake, verdicts: queue.SimpleQueue[Verdict]) -> None:
    fake.happen(1, pynvml.nvmlEventTypeXidCriticalError, 79)
    assert "of rank 9: Xid 79" in verdicts.get(timeout=SECONDS).text
    fake.happen(2, pynvml.nvmlEventTypeDoubleBitEccError)
    assert verdicts.get(timeout=SECONDS).reason == Reason.ECC
    assert fake.registered.keys() == {0, 1, 2}, "one that gives no events does not keep the others from being watched"


def test_a_gpu_that_is_lost_without_an_event_is_noticed(fake: Fake, verdicts: queue.SimpleQueue[Verdict]) -> None:
    fake.lost.add(3)
    verdict = verdicts.get(timeout=SECONDS)
    assert verdict.reason == Reason.LOST
    assert "of rank 11: GPU is lost" in verdict.text
    with pytest.raises(queue.Empty):
        verdicts.get(timeout=0.1)


def test_a_wait_that_fails_is_a_loss(fake: Fake, verdicts: queue.SimpleQueue[Verdict]) -> None:
    fake.events.put(pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert verdicts.get(timeout=SECONDS).fatal


def test_events_of_other_gpus_are_nobody_s(fake: Fake) -> None:
    told: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    watch = HealthWatch(pynvml, GPUS[:1], 0, told.put)
    watch.start()
    fake.happen(2, pynvml.nvmlEventTypeXidCriticalError, 79)
    fake.happen(0, pynvml.nvmlEventTypeXidCriticalError, 13)
    assert "of rank 0: Xid 13" in told.get(timeout=SECONDS).text
    watch.stop()


def test_the_gpus_of_a_pod_are_watched_as_cuda_numbers_them(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    told: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    with caplog.at_level("INFO"):
        watch = watch_gpus(2, told.put)
    assert watch is not None
    assert "rank 0: NVIDIA H200 GPU-2abc" in caplog.text
    fake.happen(2, pynvml.nvmlEventTypeXidCriticalError, 79)
    assert told.get(timeout=SECONDS).rank == 0
    watch.stop()


def test_without_nvml_a_pod_computes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert watch_gpus(1, lambda verdict: None) is None
    assert "not watched" in caplog.text
