"""What leader and rank hosts tell each other, as JSON. No pickle: a peer's bytes never become code.

Handshake, on every new connection:

    rank host → Challenge        leader → Hello        rank host → Accepted or Refused

Then, until one of them closes:

    leader → Join, Order, Fetch, Held, Shutdown, Beat
    rank host → PhaseOver, Loaded, Joined, Done, Fetched, Notice, Leaving, Failed, Beat
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.runtime.rank import Event
from glm52_engine.runtime.types import Sampling, Token

VERSION = 3
"""Raised whenever a message changes its meaning."""


class _Message:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Terms(_Message):
    """What all hosts of a replica must have in common. `hosts`: ranks of each host, the leader's first."""

    fingerprint: str
    hosts: tuple[int, ...]
    block_size: int
    block_bytes: int
    blocks: int
    seats: int
    max_model_len: int
    step_tokens: int

    @property
    def world(self) -> int:
        return sum(self.hosts)


@dataclass(frozen=True, slots=True)
class Challenge(_Message):
    """First word of a rank host. `nonce`: random hex, never used twice."""

    version: int
    nonce: str
    kind: Literal["challenge"] = "challenge"


@dataclass(frozen=True, slots=True)
class Hello(_Message):
    """What the leader wants this host to be; `proof` as in `handshake`."""

    version: int
    terms: Terms
    first_rank: int
    rank_count: int
    nonce: str
    proof: str
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True)
class Accepted(_Message):
    proof: str
    kind: Literal["accepted"] = "accepted"


@dataclass(frozen=True, slots=True)
class Refused(_Message):
    """`passing`: the same question may be answered otherwise in a while."""

    reason: str
    passing: bool = False
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True)
class PhaseOver(_Message):
    """See `lifecycle.phases.Phase`; of the host's start."""

    name: str
    began: float
    ended: float
    kind: Literal["phase"] = "phase"


@dataclass(frozen=True, slots=True)
class Agent(_Message):
    """See `transfer.pulls.Peer`; `metadata` in base64, regions as (address, blocks, bytes of a block), lanes as (name,
    metadata)."""

    name: str
    metadata: str
    regions: tuple[tuple[int, int, int], ...]
    first_rank: int
    lanes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded(_Message):
    """Weights and pools are there, and registered with `agent`: the host can join."""

    agent: Agent
    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True, slots=True)
class Join(_Message):
    """Form the process group by the store that listens there; `group` names it, so that no older one is met."""

    store_host: str
    store_port: int
    group: str
    debug: bool = False
    kind: Literal["join"] = "join"


@dataclass(frozen=True, slots=True)
class Joined(_Message):
    kind: Literal["joined"] = "joined"


@dataclass(frozen=True, slots=True)
class Start(_Message):
    """A sequence that takes a seat: see `runtime.rank.Running`. `constrained`: each of its tokens needs a mask."""

    key: str
    seat: int
    blocks: tuple[int, ...]
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    prefill_only: bool
    priority: int
    choices: int
    computed: int
    last: Token | None
    constrained: bool = False
    arrived: int = 0
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Flags(_Message):
    """What decides which code every rank runs in a step. `prefill`: some rank has rows of a prompt. `lease`: before its
    tokens are looked at, the step is started once more, on them. `consume`: the step is that one."""

    prefill: bool
    lease: bool = False
    consume: bool = False


@dataclass(frozen=True, slots=True)
class Shape(_Message):
    """What is the same on every rank in a step. `bucket`: rows that each rank contributes, padding included;
    `active_rows` of each rank: the rest of its rows is padding, whatever is in them. Bucket 0: nothing is computed."""

    number: int
    bucket: int
    active_rows: tuple[int, ...]
    flags: Flags


@dataclass(frozen=True, slots=True)
class Mask(_Message):
    """What a grammar lets come next in the sequence of a seat: a bit for each token id in base64, lowest bit first;
    `ended`: nothing but the end."""

    seat: int
    bits: str
    ended: bool


@dataclass(frozen=True, slots=True)
class RankOrder(_Message):
    """One rank's part of a step: sequences that begin, keys that end, then (seat, tokens) of the rows to compute, and
    the masks of those among them that draw a token under a grammar."""

    starts: tuple[Start, ...] = ()
    aborts: tuple[str, ...] = ()
    rows: tuple[tuple[int, int], ...] = ()
    masks: tuple[Mask, ...] = ()


@dataclass(frozen=True, slots=True)
class Order(_Message):
    """A step; `ranks` has the parts of the host's own ranks, in order."""

    shape: Shape
    ranks: tuple[RankOrder, ...]
    kind: Literal["order"] = "order"


@dataclass(frozen=True, slots=True)
class RankResult(_Message):
    """What a step brought on one rank. `tokens`: for each row of its order the id of a token that is nothing but one
    more, or -1; whatever else happened stands in `events`. Most rows of most steps are then one number."""

    tokens: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Done(_Message):
    """The step is over on all ranks of the host."""

    number: int
    ranks: tuple[RankResult, ...]
    kind: Literal["done"] = "done"


@dataclass(frozen=True, slots=True)
class Fetch(_Message):
    """Read KV from another pod into a pool of this host: see `transfer.pulls.Pull`. `notice` in base64."""

    number: int
    peer: Agent
    remote_rank: int
    remote_ids: tuple[int, ...]
    local_rank: int
    local_ids: tuple[int, ...]
    notice: str
    kind: Literal["fetch"] = "fetch"


@dataclass(frozen=True, slots=True)
class Fetched(_Message):
    """The answer to a Fetch; from now on nothing writes into its blocks. With an `error` they hold nothing of use."""

    number: int
    size: int
    error: str = ""
    kind: Literal["fetched"] = "fetched"


@dataclass(frozen=True, slots=True)
class Held(_Message):
    """Whether KV of this host is held for peers, who should not wait for its agent to hear them."""

    held: bool
    kind: Literal["held"] = "held"


@dataclass(frozen=True, slots=True)
class Notice(_Message):
    """A peer has read KV of this host; `data` is what it attached, in base64."""

    data: str
    kind: Literal["notice"] = "notice"


@dataclass(frozen=True, slots=True)
class Leaving(_Message):
    """The host was asked to end. It computes on until the leader has drained, and ends with the replica."""

    kind: Literal["leaving"] = "leaving"


@dataclass(frozen=True, slots=True)
class Failed(_Message):
    """The host cannot go on. `rank`: the one that failed, where one did. `refused`: the checkpoint or configuration can
    never work. `consequence`: all that is known is that another rank left."""

    reason: str
    rank: int | None = None
    refused: bool = False
    consequence: bool = False
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Shutdown(_Message):
    """The replica ends; `crashed` by a failure, whose reason it is."""

    reason: str
    crashed: bool
    kind: Literal["shutdown"] = "shutdown"


@dataclass(frozen=True, slots=True)
class Beat(_Message):
    """Still here: a peer that says nothing for long is lost, whatever its connection looks like."""

    kind: Literal["beat"] = "beat"


Message = (
    Challenge | Hello | Accepted | Refused
    | PhaseOver | Loaded | Joined | Done | Fetched | Notice | Leaving | Failed
    | Join | Order | Fetch | Held | Shutdown
    | Beat
)  # fmt: skip


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Any]:
    # Infinite log probabilities are legal; pydantic would write null.
    config = ConfigDict(ser_json_inf_nan="constants")
    return TypeAdapter(Annotated[Message, Field(discriminator="kind")], config=config)


def encode(message: Message) -> bytes:
    return _adapter().dump_json(message)


def decode(payload: bytes) -> Message:
    """Raises ProtocolError naming the field; bytes behind the message are an error too."""
    try:
        message: Message = _adapter().validate_json(payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        # Cut: the text may quote the peer, which can quote anything at any length.
        raise ProtocolError(f"a message that is none: {place + ': ' if place else ''}{first['msg']}"[:300]) from None
    return message
