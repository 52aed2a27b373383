"""The docker client, aimed at one daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import shell

CLUSTER = "glm52"
LABEL = f"io.x-k8s.kind.cluster={CLUSTER}"


@dataclass(frozen=True)
class Docker:
    """A daemon: the private one at `socket`, or with None the one that the user's own client talks to."""

    socket: Path | None = None
    client: str = "docker"

    def variables(self) -> dict[str, str | None]:
        """What a program that calls docker by itself, such as kind, must have in its environment."""
        if self.socket is None:
            return {}
        return {"DOCKER_HOST": f"unix://{self.socket}", "DOCKER_CONTEXT": None, "DOCKER_TLS_VERIFY": None}

    def environment(self) -> dict[str, str]:
        return shell.environment(self.variables())

    def command(self, *arguments: str) -> list[str]:
        return [self.client, *arguments]

    def __call__(self, *arguments: str, stdin: str = "", timeout: float | None = 120) -> str:
        return shell.run(self.command(*arguments), env=self.variables(), stdin=stdin, timeout=timeout)

    def ok(self, *arguments: str, timeout: float | None = 30) -> bool:
        return shell.ok(self.command(*arguments), env=self.variables(), timeout=timeout)

    def answers(self) -> bool:
        if self.socket is not None and not self.socket.exists():
            return False
        return self.ok("info", timeout=10)

    def exec(self, container: str, *command: str, stdin: str = "", timeout: float | None = 120) -> str:
        flags: Sequence[str] = ["--interactive"] if stdin else []
        return self("exec", *flags, container, *command, stdin=stdin, timeout=timeout)

    def nodes(self, running_only: bool = False) -> list[str]:
        """Names of our cluster's node containers."""
        flags = [] if running_only else ["--all"]
        return sorted(self("ps", *flags, "--filter", f"label={LABEL}", "--format", "{{.Names}}").split())
