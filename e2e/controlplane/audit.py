"""What the API server's audit log says of one user: every request, whoever sent it and with whatever client."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

READS = frozenset({"get", "list", "watch"})


@dataclass(frozen=True)
class Request:
    verb: str
    resource: str
    """With subresource: `glm52deployments/status`."""
    namespace: str
    name: str
    code: int
    agent: str

    @property
    def is_write(self) -> bool:
        # A review is a question that is asked by a create.
        return self.verb not in READS and not self.resource.endswith("reviews")

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.namespace}/{self.name} ({self.code})"


class Audit:
    """Reads the log from where it was last read; `mark` begins a new count."""

    def __init__(self, log: Path, user: str) -> None:
        self._log = log
        self._user = user
        self._position = 0
        self.mark()

    def mark(self) -> None:
        # What a killed process had under way is written down after it: it is not of the count that begins now.
        self._from = datetime.datetime.now(datetime.UTC)
        self._position = self._log.stat().st_size if self._log.exists() else 0

    def since(self) -> list[Request]:
        """The user's finished requests that came in since the mark. A watch counts when it begins."""
        with self._log.open("rb") as log:
            log.seek(self._position)
            return list(_requests(log.read().splitlines(), self._user, self._from))


def count(requests: Iterable[Request]) -> Counter[str]:
    """`verb resource` → how often."""
    return Counter(f"{request.verb} {request.resource}" for request in requests)


def _requests(lines: Iterable[bytes], user: str, since: datetime.datetime) -> Iterable[Request]:
    marker = json.dumps(user).encode()
    for line in lines:
        # Most lines are about others, and parsing is what takes the time. A line that is being written has no end yet.
        if marker not in line or not line.endswith(b"}"):
            continue
        event = json.loads(line)
        if (
            event["user"]["username"] != user
            or datetime.datetime.fromisoformat(event["requestReceivedTimestamp"]) < since
        ):
            continue
        watch = event["verb"] == "watch"
        if event["stage"] != ("ResponseStarted" if watch else "ResponseComplete"):
            continue
        ref = event.get("objectRef", {})
        sub = ref.get("subresource")
        yield Request(
            verb=event["verb"],
            resource=ref.get("resource", event["requestURI"]) + (f"/{sub}" if sub else ""),
            namespace=ref.get("namespace", ""),
            name=ref.get("name", ""),
            code=event.get("responseStatus", {}).get("code", 0),
            agent=event.get("userAgent", ""),
        )
