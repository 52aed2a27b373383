"""What two agents tell each other about a hand-off, as NIXL notifications. Pure.

Decode asks, and the agent that owns the KV writes it. Both directions of a pair of agents share one connection, whose
end both notice: what is said of a WRITE is said on the connection that carries its bytes. That holds where one
interface leads from one to the other. Over TCP by several there are several connections, and by another one bytes may
still come when the end of the first is told: not guarded against yet.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Said(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_bytes="base64", val_json_bytes="base64")


class Ask(_Said):
    """Write these blocks into my pool.

    `life`: which connection to that agent this is, counted up by who asks. `metadata`: NIXL's, of who asks. `rank`: of
    the pool, among those of the agent that is asked. `into`: address, blocks and bytes of a block of the pool to be
    written to. `runs`: first block there, first block here, how many. `notice`: for the owner, once all is written.
    """

    kind: Literal["ask"] = "ask"
    number: int
    life: int
    metadata: bytes
    rank: int = Field(ge=0)
    into: tuple[int, int, int]
    runs: list[tuple[int, int, int]]
    notice: bytes


class Look(_Said):
    """Asks for the end of those of these that are no longer under way. It also finds a connection that has ended."""

    kind: Literal["look"] = "look"
    life: int
    numbers: list[int]


class Over(_Said):
    """No byte of that one comes any more, and without an `error` all of them are there."""

    kind: Literal["over"] = "over"
    number: int
    error: str = ""


class Part(_Said):
    """The notice of one of `of` parts of a pull, each asked of another lane. `pull`: which one, of all that this pod
    hears of. `notice`: of the whole, for when all parts are written."""

    pull: str
    of: int = Field(ge=1)
    notice: bytes


Message = Ask | Look | Over

_PART = b"part "
"""Before a Part: notices of whole pulls have no form that is known here."""

_READ: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def has_ended(error: Exception) -> bool:
    """Whether NIXL says by this that the connection is closed on our side. Anything else that fails says nothing about
    bytes that are still to come."""
    return "REMOTE_DISCONNECT" in str(error)


def encode(message: Message) -> bytes:
    return message.model_dump_json().encode()


def decode(raw: bytes) -> Message:
    """Raises ValueError for what is none of these."""
    return _READ.validate_json(raw)


def encode_part(part: Part) -> bytes:
    return _PART + part.model_dump_json().encode()


def decode_part(notice: bytes) -> Part | None:
    """None for the notice of a whole pull."""
    if not notice.startswith(_PART):
        return None
    try:
        return Part.model_validate_json(notice[len(_PART) :])
    except ValueError:
        return None
