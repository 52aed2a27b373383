"""The thin edge to NVML: reads the inventory, and waits for events on a thread of its own. Decides nothing."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glm52_engine.config import ConfigError
from glm52_engine.hardware.health import Verdict, judge_ecc, judge_loss, judge_xid
from glm52_engine.hardware.inventory import Gpu, describe, for_ranks, visible

log = logging.getLogger(__name__)

WAIT_MILLISECONDS = 1000
"""Of one wait for events, after which each GPU is asked for a sign of life: one that is lost sends no event."""


def open_nvml() -> Any:
    """The module of nvidia-ml-py, initialised. Raises ConfigError where there is no driver."""
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ConfigError(
            f"accelerator: found nvidia, but this pod has no NVIDIA driver ({error}): ask for GPUs (nvidia.com/gpu), "
            "or set accelerator to cpu"
        ) from error
    return nvml


def read_inventory(nvml: Any, sysfs: Path = Path("/sys")) -> list[Gpu]:
    """Every GPU that this container is given, in NVML's order."""
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory, bus = nvml.nvmlDeviceGetMemoryInfo(handle), _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
        gpus.append(Gpu(index, uuid, name, bus, memory.total, memory.free, _numa(sysfs, bus)))
    return gpus


def watch_gpus(ranks: int, on_verdict: Callable[[Verdict], None], *, first_rank: int = 0) -> HealthWatch | None:
    """Logs which GPU each rank of this pod has, and watches them; ranks are numbered from `first_rank` on. None where
    NVML is not to be had: a container may be given its GPUs without it (NVIDIA_DRIVER_CAPABILITIES without `utility`),
    and computes all the same."""
    try:
        nvml = open_nvml()
        gpus = for_ranks(visible(read_inventory(nvml), os.environ.get("CUDA_VISIBLE_DEVICES")), ranks)
    except ConfigError as error:
        log.warning("the health of the GPUs is not watched", extra={"reason": str(error)})
        return None
    for rank, gpu in enumerate(gpus, start=first_rank):
        log.info(describe(gpu, rank))
    watch = HealthWatch(nvml, gpus, first_rank, on_verdict)
    watch.start()
    return watch


class HealthWatch:
    """Tells `on_verdict`, on its own thread, of every event of the ranks' GPUs; ends with the first lost GPU."""

    def __init__(self, nvml: Any, gpus: Sequence[Gpu], first_rank: int, on_verdict: Callable[[Verdict], None]) -> None:
        self._nvml, self._on_verdict = nvml, on_verdict
        self._ranks = {gpu.uuid: (gpu, first_rank + place) for place, gpu in enumerate(gpus)}
        self._handles = {gpu.uuid: nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * WAIT_MILLISECONDS / 1000)

    def _run(self) -> None:
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        try:
            for uuid in self._handles:
                self._register(uuid, events)
            while not self._stop.is_set() and self._turn(events):
                pass
        finally:
            nvml.nvmlEventSetFree(events)

    def _register(self, uuid: str, events: Any) -> None:
        nvml = self._nvml
        try:
            supported = nvml.nvmlDeviceGetSupportedEventTypes(self._handles[uuid])
            wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
            nvml.nvmlDeviceRegisterEvents(self._handles[uuid], supported & wanted, events)
        except nvml.NVMLError as error:
            # In some virtual machines there are no events; the sign of life is then all that is watched.
            log.warning("no events of this GPU are watched", extra={"gpu": uuid, "reason": str(error)})

    def _turn(self, events: Any) -> bool:
        """One wait; False when a GPU is lost."""
        nvml = self._nvml
        try:
            self._take(nvml.nvmlEventSetWait_v2(events, WAIT_MILLISECONDS))
            return True
        except nvml.NVMLError_Timeout:
            lost = self._lost()
        except nvml.NVMLError as error:
            lost = self._lost() or [(uuid, str(error)) for uuid in list(self._handles)[:1]]
        for uuid, words in lost:
            self._on_verdict(judge_loss(*self._ranks[uuid], words))
        return not lost

    def _take(self, event: Any) -> None:
        nvml = self._nvml
        found = self._ranks.get(_text(nvml.nvmlDeviceGetUUID(event.device)))
        if found is None:
            return
        if event.eventType == nvml.nvmlEventTypeXidCriticalError:
            self._on_verdict(judge_xid(*found, int(event.eventData)))
        elif event.eventType == nvml.nvmlEventTypeDoubleBitEccError:
            self._on_verdict(judge_ecc(*found))

    def _lost(self) -> list[tuple[str, str]]:
        """GPUs that NVML does not reach, with its words."""
        lost = []
        for uuid, handle in self._handles.items():
            try:
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError as error:
                lost.append((uuid, str(error)))
        return lost


def _numa(sysfs: Path, bus: str) -> int | None:
    """From sysfs: NVML answers only on machines where GPU memory is a node of its own."""
    domain, _, rest = bus.lower().partition(":")
    try:
        node = int((sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
