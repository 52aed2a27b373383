"""Which host of its replica a pod is, and where the others are, from nothing but its name. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from glm52_engine.config import ConfigError, host_index
from glm52_engine.ranks.spans import RANK_PORT


@dataclass(frozen=True, slots=True)
class Place:
    index: int
    """0 is the leader."""
    rank_hosts: tuple[str, ...]
    """HOST:PORT of the replica's other pods, in the order of their ranks; the leader calls them."""


def place_of(pod: str, hosts: int, domain: str) -> Place:
    """`domain`: what the StatefulSet's pods have DNS names under. Raises ConfigError for a pod without a number."""
    index = host_index(pod, hosts)
    if index is None:
        raise ConfigError(f"POD_NAME: found {pod!r}; expected a name that ends with the pod's number, as decode-3")
    workload, _, number = pod.rpartition("-")
    leader = int(number) - index
    others = (f"{workload}-{leader + host}.{domain}:{RANK_PORT}" for host in range(1, hosts))
    return Place(index, tuple(others))
