"""Paths of KV from prefill pods to decode pods: which of them have become slow, and which are no longer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from glm52_operator import names
from glm52_operator.desired.target import Target
from glm52_operator.plan.events import Notice
from glm52_operator.plan.pods import Pod, is_leaving, is_ready, name
from glm52_operator.plan.rollout.replicas import ordinal_of

WELL = 5
"""Answers in which a path was well, and none in which it was slow, after which it has recovered. One whose rate goes up
and down around the limit would be an event a minute for as long as it lasts."""

LISTED = 4
"""Paths that one event names, the slowest: a decode pod on a bad link has as many as there are prefill pods."""


@dataclass(frozen=True, slots=True)
class Path:
    """What a decode pod says of one of its paths; bytes a second."""

    peer: str
    """The prefill pod's name."""
    rate: float
    best: float
    """Of its other paths; 0 without any."""
    slow: bool


@dataclass(frozen=True, slots=True)
class Reader:
    """The decode pod that reads for its replica."""

    name: str
    address: str | None
    """None: it is not ready, and not asked."""


Known = Mapping[str, Mapping[str, int]]
"""By the decode pod's uid and the prefill pod's name: slow paths that were told of, with the answers in which each has
been well since it was last slow."""


def ends(target: Target, pods: Mapping[names.Component, Sequence[Pod]]) -> tuple[dict[str, Reader], frozenset[str]]:
    """Who reads, by uid, and the names of the pods that may be read from."""
    workload, hosts = names.role(target.name, "decode"), target.hosts("decode")
    found = {}
    for pod in pods.get("decode", ()):
        number = ordinal_of(name(pod), workload)
        if number is not None and number % hosts == 0 and not is_leaving(pod):
            address = pod.get("status", {}).get("podIP") if is_ready(pod) else None
            found[pod["metadata"]["uid"]] = Reader(name(pod), address)
    return found, frozenset(name(pod) for pod in pods.get("prefill", ()))


def news(
    known: Known, readers: Mapping[str, Reader], peers: Collection[str], answers: Mapping[str, Sequence[Path]]
) -> tuple[Known, list[Notice]]:
    """What is known after these answers, by uid, and what of it was not known before.

    A pod that did not answer has said nothing: what is known of it stays. Where one end is gone nothing has recovered.
    """
    after: dict[str, dict[str, int]] = {}
    notices: list[Notice] = []
    for uid, reader in readers.items():
        before = {peer: well for peer, well in known.get(uid, {}).items() if peer in peers}
        if uid in answers:
            # Names of pods that there are, and no others: what a pod says comes from where clients' requests run.
            before, told = _judged(reader, before, [path for path in answers[uid] if path.peer in peers])
            notices += told
        if before:
            after[uid] = before
    return after, notices


def _judged(reader: Reader, before: Mapping[str, int], said: Sequence[Path]) -> tuple[dict[str, int], list[Notice]]:
    slow = {path.peer: path for path in said if path.slow}
    well = {path.peer: before[path.peer] + 1 for path in said if path.peer in before and path.peer not in slow}
    over = sorted(peer for peer, answers in well.items() if answers >= WELL)
    new = [path for peer, path in slow.items() if peer not in before]
    notices = []
    if new:
        notices.append(Notice("Warning", "TransferSlow", "Transfer", _slow(reader, new)))
    if over:
        note = f"{reader.name} reads KV from {_listed(over)} as fast as it should again."
        notices.append(Notice("Normal", "TransferRecovered", "Transfer", note))
    # What is not spoken of stays known: the pod has begun anew, or too little came to tell.
    left = {**before, **well, **dict.fromkeys(slow, 0)}
    return {peer: answers for peer, answers in left.items() if answers < WELL}, notices


def _slow(reader: Reader, paths: list[Path]) -> str:
    paths = sorted(paths, key=lambda path: (path.rate, path.peer))
    told = _listed([f"{path.peer} at {_speed(path.rate)} ({_others(path)})" for path in paths])
    return (
        f"{reader.name} reads KV slowly from {told}. Prompts wait for it. Look at the network between the nodes of "
        "these pods, and whether spec.kvTransfer.netDevices names the devices that KV should take: docs/metrics.md, "
        "Slow paths."
    )


def _others(path: Path) -> str:
    return f"best of the others: {_speed(path.best)}" if path.best else "no other to compare with"


def _listed(words: list[str]) -> str:
    more = [f"{len(words) - LISTED} more"] if len(words) > LISTED else []
    return ", ".join([*words[:LISTED], *more])


def _speed(rate: float) -> str:
    return f"{rate / 1e6:.{0 if rate >= 1e7 else 1}f} MB/s"
