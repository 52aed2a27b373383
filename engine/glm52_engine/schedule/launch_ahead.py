"""Whether a step may be started before the tokens of the one before it are known. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_ROWS = 256
"""Of a rank in one step of fixed shape. More decodes run as several such steps, and only one can feed itself."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence in the step that runs.

    `decoding`: its row is a single token that gives the next one. `greedy`: the next token is the greatest logit, and
    nothing of the request has to look at it before it is fed back. `tokens_left`: output tokens still allowed, the
    running step's included. `room`: tokens that its blocks can still take behind what the running step writes.
    """

    decoding: bool
    greedy: bool
    tokens_left: int
    room: int


def may_lease(ranks: Sequence[Sequence[Row]], *, arrivals: bool, stopping: bool) -> bool:
    """Whether the next step can repeat this one's shape on the device's own tokens; `ranks` has each rank's rows.

    Who waits for a seat is no reason against it: under load somebody always does, and a seat that comes free by a token
    is given away one step later. Not with `arrivals`: news of sequences wait to be applied, and would wait a step
    longer. A row whose token is its last one by length is known to leave; one that ends by its token is not, and its
    row of the leased step is for nobody: its blocks must stay its own until that step is over.
    """
    every = [row for rows in ranks for row in rows]
    return (
        bool(every)
        and not arrivals
        and not stopping
        and all(len(rows) <= MOST_ROWS for rows in ranks)
        and all(row.decoding and row.greedy and row.tokens_left >= 2 and row.room >= 1 for row in every)
    )
