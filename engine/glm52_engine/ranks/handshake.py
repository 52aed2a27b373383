"""Whether a leader and a rank host belong together. The decisions are pure; who is asked shows it knows the secret.

Both sides prove it on the other's fresh nonce, so the secret never crosses the wire and a recorded handshake is of no
use. Proof: HMAC-SHA-256 over the side's name, the nonce, and the message with an empty proof.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import fields, replace

from glm52_engine.lifecycle.start import InternalToken
from glm52_engine.ranks.frames import ProtocolError
from glm52_engine.ranks.messages import VERSION, Accepted, Challenge, Hello, Message, Refused, Terms, encode
from glm52_engine.ranks.spans import RankSpan

HANDSHAKE_SECONDS = 10.0
"""For a peer to say its part; one that connects and stays silent must not keep the next leader out."""


class HandshakeError(Exception):
    """Leader and host do not belong together. `passing`: it may be otherwise in a while."""

    def __init__(self, reason: str, *, passing: bool = False) -> None:
        super().__init__(reason)
        self.passing = passing


def challenge() -> Challenge:
    return Challenge(VERSION, secrets.token_hex(16))


def hello(asked: Challenge, terms: Terms, span: RankSpan, secret: str) -> Hello:
    """The leader's answer to a challenge. Raises HandshakeError for a host of another version."""
    if asked.version != VERSION:
        raise HandshakeError(f"it speaks version {asked.version} of the rank protocol, this leader version {VERSION}")
    plain = Hello(VERSION, terms, span.first_rank, span.rank_count, secrets.token_hex(16), "")
    return replace(plain, proof=_proof(secret, "leader", asked.nonce, plain))


def known(said: Hello, asked: Challenge, token: InternalToken) -> str | Refused:
    """The secret with which the peer has shown that it knows one of those that are taken. One that knows none is
    refused and is to learn nothing else."""
    if said.version != VERSION:
        return Refused(f"the leader speaks version {said.version} of the rank protocol, this host version {VERSION}")
    plain = replace(said, proof="")
    matches = [hmac.compare_digest(said.proof, _proof(each, "leader", asked.nonce, plain)) for each in token.taken]
    if not any(matches):
        return Refused("the shared secret differs: expected that of this deployment")
    return token.taken[matches.index(True)]


def answer(said: Hello, terms: Terms, span: RankSpan, secret: str) -> Accepted | Refused:
    """The host's word on the Hello of a peer that knows the secret: its own `terms` and `span` against the leader's."""
    wrong = difference(terms, said.terms)
    if wrong:
        return Refused(f"the two do not belong together: {wrong}")
    if (said.first_rank, said.rank_count) != (span.first_rank, span.rank_count):
        theirs = RankSpan("", said.first_rank, said.rank_count)
        return Refused(f"the leader gives this host {theirs}, it was started for {span}")
    accepted = Accepted("")
    return replace(accepted, proof=_proof(secret, "host", said.nonce, accepted))


def check(answered: Message, said: Hello, secret: str) -> None:
    """The leader's look at the answer; raises HandshakeError, and ProtocolError where it is none."""
    if isinstance(answered, Refused):
        raise HandshakeError(f"refused: {answered.reason}", passing=answered.passing)
    if not isinstance(answered, Accepted):
        raise ProtocolError(f"the peer answers with {type(answered).__name__}; expected Accepted or Refused")
    if not hmac.compare_digest(answered.proof, _proof(secret, "host", said.nonce, replace(answered, proof=""))):
        raise HandshakeError("it accepted without knowing the shared secret: it is no rank host of this deployment")


def difference(ours: Terms, theirs: Terms) -> str:
    """Empty when equal; else each differing field with both values."""
    return "; ".join(
        f"{field.name}: this host has {getattr(ours, field.name)!r}, the leader {getattr(theirs, field.name)!r}"
        for field in fields(Terms)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    )


def _proof(secret: str, side: str, nonce: str, message: Hello | Accepted) -> str:
    words = b"\0".join((side.encode(), nonce.encode(), encode(message)))
    return hmac.new(secret.encode(), words, "sha256").hexdigest()
