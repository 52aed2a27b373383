"""The nodes and what runs on them: listed when somebody has to know, and kept for some seconds for everybody else."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from glm52_operator.plan.capacity import Cluster, slim_node, slim_pod, survey
from glm52_operator.reconcile.client import Api, ApiError
from glm52_operator.reconcile.clock import Clock
from glm52_operator.reconcile.kinds import NODE, POD
from glm52_operator.status.conditions import Verdict

log = logging.getLogger("glm52.nodes")

FRESH_SECONDS = 10.0
REFUSED_SECONDS = 60.0
"""A missing permission is not given from one second to the next."""
_UNFINISHED = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(slots=True)
class Nodes:
    api: Api
    clock: Clock
    _known: Cluster | Verdict | None = None
    _until: float = 0.0
    _listing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A burst of deployments asks at once, and one list answers them all."""

    async def look(self) -> Cluster | Verdict:
        """The cluster at most some seconds ago, or why it cannot be seen."""
        async with self._listing:
            if self._known is None or self.clock.now() >= self._until:
                self._known = await self._list()
                refused = isinstance(self._known, Verdict) and self._known.reason == "Forbidden"
                self._until = self.clock.now() + (REFUSED_SECONDS if refused else FRESH_SECONDS)
            return self._known

    async def _list(self) -> Cluster | Verdict:
        try:
            nodes, _ = await self.api.list(NODE, None, keep=slim_node)
            pods, _ = await self.api.list(POD, None, fields=_UNFINISHED, keep=slim_pod)
        except ApiError as error:
            return _unknown(error)
        return survey(nodes, pods)


def _unknown(error: ApiError) -> Verdict:
    if error.code in (401, 403):
        return Verdict(
            None,
            "Forbidden",
            f"Not known: the operator may not list {error.kind.plural} of the whole cluster. Install it with "
            "rbac.clusterWide=true, or grant its service account the verb 'list' on 'nodes' and 'pods' by a "
            "ClusterRole. Nothing else depends on it.",
        )
    log.warning("cannot look at the nodes: %s", error)
    return Verdict(None, "NotObserved", f"Not known: listing {error.kind.plural} failed. The operator tries again.")
