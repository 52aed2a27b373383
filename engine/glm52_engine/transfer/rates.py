"""How fast KV comes from each prefill pod, measured by what is pulled anyway. Pure; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEAST_BYTES = 4 << 20
"""Before a rate is told: less than that says how long a question takes, and not how fast bytes come."""

KEPT = 0.8
"""Of what was measured before, at each new measurement: the last few pulls make the rate."""

SLOW = 200e6
"""Bytes a second at which the KV of the longest prompts does not come within `agent.PULL_SECONDS`."""

BEHIND = 4
"""Times slower than another pod's path: that one shows what this pod's own side can do."""

FORGOTTEN_SECONDS = 600.0


@dataclass(slots=True)
class Path:
    """From one prefill pod. `size` bytes in `busy` seconds in which at least one pull ran, older ones counting less."""

    peer: str
    size: float = 0.0
    busy: float = 0.0
    running: int = 0
    since: float = 0.0
    pending: int = 0
    slow: bool = False
    best: float = 0.0
    """Of the others' rates when this one was judged; 0 without any."""
    told: bool = False

    @property
    def rate(self) -> float:
        """Bytes a second; 0 while too little has come."""
        return self.size / self.busy if self.size >= LEAST_BYTES and self.busy else 0.0


class Rates:
    """Paths by the name of the pod at the other end."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}

    def begin(self, peer: str, now: float) -> None:
        path = self.paths.setdefault(peer, Path(peer))
        if not path.running:
            path.since = now
        path.running += 1

    def end(self, peer: str, size: int, now: float) -> Path | None:
        """A pull is over; `size` 0 for one that failed. The path where there is news of it: its first rate, or that
        it has become slow, or is no longer."""
        path = self.paths[peer]
        path.running -= 1
        path.pending += size
        if path.running:
            return None
        seconds, path.since = now - path.since, now
        if not path.pending:
            return None
        path.size = path.size * KEPT + path.pending
        path.busy = path.busy * KEPT + seconds
        path.pending = 0
        for stale in [p.peer for p in self.paths.values() if not p.running and now - p.since > FORGOTTEN_SECONDS]:
            del self.paths[stale]
        return self._judged(path)

    def card(self) -> list[dict[str, Any]]:
        """Every path that has a rate, for the operator, so that one that is slow no longer is told from one that is
        forgotten."""
        return [
            {"peer": path.peer, "bytes_per_second": round(path.rate), "best": round(path.best), "slow": path.slow}
            for path in self.paths.values()
            if path.rate
        ]

    def _judged(self, path: Path) -> Path | None:
        if not path.rate:
            return None
        path.best = max((other.rate for other in self.paths.values() if other is not path), default=0.0)
        slow = path.rate < max(SLOW, path.best / BEHIND)
        news = slow != path.slow or not path.told
        path.slow, path.told = slow, True
        return path if news else None
