"""Which host has which ranks, and which rank has which experts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RANK_PORT = 8001
"""Where a rank host listens for its leader."""

LOCAL = "local"
"""Name of the leader's own span."""


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where a rank host listens, and how many ranks it has."""

    host: str
    port: int
    ranks: int

    @property
    def name(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, ranks: int) -> RankHost:
        """`HOST:PORT`, an IPv6 address in brackets. Raises ValueError with what is wrong."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (colon and host):
            raise ValueError(f"{text!r}: expected HOST:PORT")
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
            raise ValueError(f"{text!r}: {port!r} is no port; expected 1 to 65535")
        return cls(host, int(port), ranks)


@dataclass(frozen=True, slots=True)
class RankSpan:
    """Ranks [first_rank, first_rank + rank_count) of a replica, all on one host."""

    host: str
    first_rank: int
    rank_count: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.rank_count)

    def __str__(self) -> str:
        last = self.first_rank + self.rank_count - 1
        return f"rank {last}" if self.rank_count == 1 else f"ranks {self.first_rank} to {last}"


def rank_spans(local_ranks: int, hosts: Sequence[RankHost]) -> list[RankSpan]:
    """Contiguous spans in the order given, the leader's own ranks first. Raises ValueError where a host has no rank
    or is named twice: it would be given two spans and could serve one."""
    spans: list[RankSpan] = []
    first = 0
    for name, count in [(LOCAL, local_ranks), *((host.name, host.ranks) for host in hosts)]:
        if count < 1:
            raise ValueError(f"{name}: {count} ranks; expected at least 1")
        if any(span.host == name for span in spans):
            raise ValueError(f"{name}: named twice; expected each rank host once")
        spans.append(RankSpan(name, first, count))
        first += count
    return spans


def experts_of(ranks: range, *, world: int, experts: int) -> range:
    """Routed experts that contiguous `ranks` of `world` hold: contiguous too; ranks differ by one expert at most."""
    return range(ranks.start * experts // world, ranks.stop * experts // world)
