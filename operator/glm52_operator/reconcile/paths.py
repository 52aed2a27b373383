"""Asks decode pods once a minute how fast KV comes to them, and tells of what has become slow.

They measure it by what they read anyway, and nobody else knows: no object of the API says it. No request to the API
server comes of it but the events, and no pass.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from glm52_operator.plan.events import Notice
from glm52_operator.plan.paths import Known, Path, Reader, news
from glm52_operator.reconcile.asking import Asking
from glm52_operator.reconcile.clock import Clock, sleep
from glm52_operator.reconcile.store import Key

log = logging.getLogger("glm52.paths")

ASK_SECONDS = 60.0
AT_ONCE = 8
"""Questions under way, of all deployments together."""

Ask = Callable[[str], Awaitable[Sequence[Path] | None]]
Tell = Callable[[Key, list[Notice]], Awaitable[None]]
Follow = Callable[[Key, Mapping[str, Reader], Collection[str]], None]


@dataclass(slots=True)
class Paths:
    """`ask`: a pod's address → its paths, None where it does not say; `tell`: makes events of a deployment."""

    clock: Clock
    ask: Ask
    tell: Tell
    _ends: dict[Key, tuple[Mapping[str, Reader], Collection[str]]] = field(default_factory=dict)
    _known: dict[Key, Known] = field(default_factory=dict)
    _asking: Asking[Sequence[Path]] = field(init=False)

    def __post_init__(self) -> None:
        self._asking = Asking(self.ask, AT_ONCE)

    def follow(self, key: Key, readers: Mapping[str, Reader], peers: Collection[str]) -> None:
        """From now on ask these of the deployment, by uid, about paths from pods of these names."""
        if readers:
            self._ends[key] = readers, peers
            self._asking.start(key, self._keep_asking, "paths")
        else:
            self._ends.pop(key, None)
            self._known.pop(key, None)
            self._asking.stop(key)

    async def close(self) -> None:
        await self._asking.close()

    async def _keep_asking(self, key: Key) -> None:
        # An operator that starts finds all its deployments at once, and each keeps its place in the minute.
        await sleep(self.clock, zlib.crc32("/".join(key).encode()) % ASK_SECONDS)
        while True:
            try:
                await self._round(key)
            except Exception:
                # A bug here must not end it without a word.
                log.exception("%s/%s: paths of KV are not known", *key)
            await sleep(self.clock, ASK_SECONDS)

    async def _round(self, key: Key) -> None:
        asked = {uid: reader.address for uid, reader in self._ends[key][0].items() if reader.address}
        answers = await self._asking.answers(asked)
        # Pods may have come and gone meanwhile.
        self._known[key], notices = news(self._known.get(key, {}), *self._ends[key], answers)
        if notices:
            await self.tell(key, notices)


def read(body: object) -> Sequence[Path] | None:
    """A pod's answer at its readiness endpoint; None for what does not speak of paths, or not as expected."""
    if not isinstance(body, dict) or body.get("stage") != "Ready":
        return None
    told = body.get("kv_paths", [])
    paths = [_path(each) for each in told] if isinstance(told, list) else [None]
    found = [path for path in paths if path is not None]
    return found if len(found) == len(paths) else None


def _path(told: object) -> Path | None:
    if not isinstance(told, dict):
        return None
    peer, slow, rate, best = (told.get(field) for field in ("peer", "slow", "bytes_per_second", "best"))
    if not (isinstance(peer, str) and isinstance(slow, bool) and _is_rate(rate) and _is_rate(best)):
        return None
    return Path(peer, float(rate), float(best), slow)


def _is_rate(told: object) -> TypeGuard[float]:
    return isinstance(told, int | float) and not isinstance(told, bool) and math.isfinite(told) and told >= 0
