"""Asks pods that leave how far they are, as long as they leave: no object of the API says it, and no secret is needed.

The pass over a deployment never waits for an answer: it takes what was heard last, and news bring another pass.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp

from glm52_engine.config import API_PORT, READYZ
from glm52_operator.plan.drains import Heard
from glm52_operator.reconcile.asking import Asking
from glm52_operator.reconcile.clock import Clock, sleep
from glm52_operator.reconcile.store import Key

log = logging.getLogger("glm52.drains")

ASK_SECONDS = 3.0
ANSWER = aiohttp.ClientTimeout(total=2.0)
AT_ONCE = 32
"""Questions under way, of all deployments together."""

Ask = Callable[[str], Awaitable[Heard | None]]

T = TypeVar("T")


@dataclass(slots=True)
class Listener:
    """`ask`: a pod's address → what it says, None where it says nothing; `wake`: a deployment has news."""

    clock: Clock
    ask: Ask
    wake: Callable[[Key], None] = lambda key: None
    _pods: dict[Key, Mapping[str, str]] = field(default_factory=dict)
    _heard: dict[Key, dict[str, Heard]] = field(default_factory=dict)
    _asking: Asking[Heard] = field(init=False)

    def __post_init__(self) -> None:
        self._asking = Asking(self.ask, AT_ONCE)

    def follow(self, key: Key, pods: Mapping[str, str]) -> None:
        """From now on ask these, uid → address, and no other ones of the deployment."""
        if pods:
            self._pods[key] = dict(pods)
            self._asking.start(key, self._keep_asking, "listen")
        else:
            self._pods.pop(key, None)
            self._heard.pop(key, None)
            self._asking.stop(key)

    def heard(self, key: Key) -> Mapping[str, Heard]:
        """What the pods said last, by uid."""
        return self._heard.get(key, {})

    async def close(self) -> None:
        await self._asking.close()

    async def _keep_asking(self, key: Key) -> None:
        while True:
            told = await self._asking.answers(self._pods[key])
            before = self.heard(key)
            # A pod too busy to answer once has not lost what it said before.
            self._heard[key] = {uid: heard for uid, heard in {**before, **told}.items() if uid in self._pods[key]}
            if self._heard[key] != before:
                self.wake(key)
            await sleep(self.clock, ASK_SECONDS)


def over_http(
    session: aiohttp.ClientSession, read: Callable[[object], T | None]
) -> Callable[[str], Awaitable[T | None]]:
    """Asks the pods' readiness endpoint; `read` makes sense of the answer."""

    async def ask(address: str) -> T | None:
        host = f"[{address}]" if ":" in address else address
        try:
            async with session.get(f"http://{host}:{API_PORT}{READYZ}", timeout=ANSWER) as response:
                return read(await response.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.debug("%s does not answer: %r", address, error)
            return None

    return ask


def read(body: object) -> Heard | None:
    """A pod's answer; None for what does not speak of a drain."""
    if not isinstance(body, dict) or body.get("stage") not in ("Draining", "Stopped"):
        return None
    in_flight = body.get("in_flight")
    if not isinstance(in_flight, int) or isinstance(in_flight, bool) or in_flight < 0:
        return None
    return Heard(in_flight, stopped=body["stage"] == "Stopped")
