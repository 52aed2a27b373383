"""What an event of a GPU means for the rank that computes on it. Pure.

Codes and what to do about them: NVIDIA's Xid catalog, https://docs.nvidia.com/deploy/xid-errors/.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from glm52_engine.hardware.inventory import Gpu


class Reason(enum.StrEnum):
    """Name of a crash that a GPU caused."""

    LOST = "GpuLost"
    ECC = "GpuEccError"
    LINK = "GpuLinkError"
    XID = "GpuXid"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`fatal`: what was computed since may be wrong, or nothing will be computed any more."""

    reason: Reason
    fatal: bool
    text: str
    rank: int


_RESTART = "the replica starts anew on it"
_RESET = "the GPU needs a reset before it is used again: drain the node"
_NODE = "the GPU is gone until the node is restarted: drain the node"

_KNOWN: dict[int, tuple[Reason, bool, str, str]] = {
    13: (Reason.XID, True, "an exception in a kernel", _RESTART),
    31: (Reason.XID, True, "a page fault of a kernel", _RESTART),
    43: (Reason.XID, True, "the GPU stopped a faulty process", _RESTART),
    45: (Reason.XID, True, "work was cut off by an earlier error", _RESTART),
    48: (Reason.ECC, True, "an uncorrectable memory error", _RESET),
    62: (Reason.XID, True, "the GPU's controller halted", _RESET),
    63: (Reason.ECC, False, "a memory row was marked for replacement", "it is replaced at the next reset"),
    64: (Reason.ECC, True, "a memory row could not be replaced", _RESET),
    74: (Reason.LINK, True, "an NVLink error", _RESET),
    79: (Reason.LOST, True, "the GPU fell off the bus", _NODE),
    92: (Reason.ECC, False, "many corrected memory errors", "watch it"),
    94: (Reason.ECC, True, "an uncorrectable memory error, contained to this process", _RESTART),
    95: (Reason.ECC, True, "an uncorrectable memory error that was not contained", _RESET),
    119: (Reason.XID, True, "the GPU's system processor does not answer", _RESET),
    120: (Reason.XID, True, "the GPU's system processor failed", _RESET),
    121: (Reason.LINK, False, "corrected errors on the link to the CPU", "watch it"),
}


def judge_xid(gpu: Gpu, rank: int, code: int) -> Verdict:
    """A code that is not known is fatal: NVML reports critical ones only, and wrong tokens cost more than a restart."""
    reason, fatal, what, remedy = _KNOWN.get(
        code, (Reason.XID, True, "an error that this engine does not know", _RESET)
    )
    return Verdict(reason, fatal, f"{reason}: {_of(gpu, rank)}: Xid {code}, {what}; {remedy}", rank)


def judge_ecc(gpu: Gpu, rank: int) -> Verdict:
    """A double bit error outside of any Xid."""
    return Verdict(Reason.ECC, True, f"{Reason.ECC}: {_of(gpu, rank)}: an uncorrectable memory error; {_RESET}", rank)


def judge_loss(gpu: Gpu, rank: int, words: str) -> Verdict:
    """NVML itself no longer reaches the GPU."""
    return Verdict(Reason.LOST, True, f"{Reason.LOST}: {_of(gpu, rank)}: {words}; {_NODE}", rank)


def _of(gpu: Gpu, rank: int) -> str:
    return f"GPU {gpu.index} ({gpu.uuid}, {gpu.bus}) of rank {rank}"
