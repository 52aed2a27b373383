"""What the operator is started with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    engine_image: str | None = None
    """Image of deployments that name none."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty: the whole cluster."""
    health_host: str = "0.0.0.0"
    health_port: int = 8080
    workers: int = 8
    lease: tuple[str, str] | None = None
    """Namespace and name of the Lease by which one of several processes acts; None: this one acts alone."""
    identity: str = ""
    """Who holds the lease: the same after a restart of the same pod, never the same for two pods."""

    @property
    def scopes(self) -> tuple[str | None, ...]:
        return self.namespaces or (None,)
