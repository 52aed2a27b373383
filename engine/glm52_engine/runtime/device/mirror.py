"""The same KV blocks in host memory and on a device: copies of whole blocks in both directions, beside the compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm52_engine.kv import runs
from glm52_engine.runtime.landed import Landed


class Mirror:
    """`host` and `device`: uint8 [blocks, block_bytes], block i of one standing for block i of the other.

    Copies run in order on a stream of their own. On a machine without one they are done when the call returns.
    """

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        if host.shape != device.shape:
            raise ValueError(f"blocks of host and device differ: {tuple(host.shape)} and {tuple(device.shape)}")
        self._host, self._device = host, device
        self._stream = torch.cuda.Stream(device.device) if device.is_cuda else None

    def to_device(self, blocks: Sequence[int]) -> None:
        """Whatever is started on the current stream afterwards finds the blocks."""
        self._copy(self._device, self._host, blocks)
        if self._stream is not None:
            torch.cuda.current_stream(self._device.device).wait_stream(self._stream)

    def to_host(self, blocks: Sequence[int]) -> None:
        """Copies what the current stream has written so far; the bytes are there after `settle`."""
        self._copy(self._host, self._device, blocks)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def landed(self) -> Landed:
        """To be asked later whether the copies that were begun so far are done."""
        if self._stream is None:
            return lambda: True
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.query

    def _copy(self, to: torch.Tensor, of: torch.Tensor, blocks: Sequence[int]) -> None:
        if self._stream is None:
            for (start,), count in runs(blocks):
                to[start : start + count].copy_(of[start : start + count])
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device.device))
        with torch.cuda.stream(self._stream):
            for (start,), count in runs(blocks):
                to[start : start + count].copy_(of[start : start + count], non_blocking=True)
