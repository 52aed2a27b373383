"""The condition Schedulable: is there a node for every pod that is wanted, and if not, what is short?

Figures are coarse, and none are told once every pod has its node: pods of others come and go, and a status that
followed them would be written for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from glm52_engine.sizing import GIB, gib
from glm52_operator import names
from glm52_operator.plan.capacity import MEMORY, PODS, Cluster, Demand, Fit, Obstacle, fits
from glm52_operator.status.conditions import Verdict

UNOBSERVED = Verdict(None, "NotObserved", "The nodes were not looked at yet.")
_SHOWN_NODES = 3
_STEP_GIB = Decimal("0.5")
_STEP_CPU = Decimal("0.05")
_WORDS = {"notReady": "not ready", "cordoned": "cordoned", PODS: "the number of pods"}
_PLACED = Verdict(True, "Placed", "Every pod that is wanted has a node.")


def schedulable(demanded: Sequence[Demand], cluster: Cluster | Verdict | None) -> Verdict:
    """The condition; a Verdict instead of the cluster says why it could not be looked at."""
    if not any(demand.missing for demand in demanded):
        return _PLACED
    if cluster is None:
        return UNOBSERVED
    if isinstance(cluster, Verdict):
        return cluster
    found = fits(demanded, cluster)
    lacking = [fit for fit in found if fit.room < fit.demand.missing]
    if lacking:
        text = " ".join(_lack(fit) for fit in lacking)
        return Verdict(False, "NoRoom", f"{text} {_sums(lacking)}{_remedy(lacking)}")
    crowded = [fit for fit in found if fit.placed < fit.demand.missing]
    if crowded:
        each = ", ".join(map(_pods, found))
        left = ", ".join(f"{fit.demand.missing - fit.placed} {fit.demand.component}" for fit in crowded)
        text = f"The nodes have room for each part by itself, but not for {each} together: {left} would wait."
        return Verdict(False, "NoRoom", f"{text} {_sums(found)}{_remedy(found)}")
    return Verdict(True, "Room", " ".join(f"{_count(fit)}." for fit in found))


def _count(fit: Fit) -> str:
    return f"{fit.fitting} of {fit.nodes} nodes can hold a {fit.demand.component} pod of {_size(fit)}"


def _lack(fit: Fit) -> str:
    text = _count(fit)
    if fit.fitting:
        text += f", {fit.room} in all, and {fit.demand.missing} have no node yet"
    return f"{text}: {_obstacles(fit.obstacles)}." if fit.obstacles else f"{text}."


def _pods(fit: Fit) -> str:
    plural = "" if fit.demand.missing == 1 else "s"
    return f"{fit.demand.missing} {fit.demand.component} pod{plural} of {_size(fit)}"


def _size(fit: Fit) -> str:
    return gib(int(fit.demand.requests.get(MEMORY, 0)))


def _obstacles(obstacles: Sequence[Obstacle]) -> str:
    groups: dict[tuple[str, str], list[Obstacle]] = {}
    for obstacle in obstacles:
        groups.setdefault((obstacle.why, obstacle.what), []).append(obstacle)
    # What is short comes first: it is what can be changed.
    return "; ".join(_group(*key, groups[key]) for key in sorted(groups, key=lambda key: (key[0] != "short", *key)))


def _group(why: str, what: str, hit: Sequence[Obstacle]) -> str:
    if why == "short":
        shown = sorted(hit, key=lambda obstacle: (-_coarse(what, obstacle.free), obstacle.node))
        each = [f"{obstacle.node} ({_free(what, obstacle.free)})" for obstacle in shown]
        return f"{_WORDS.get(what, what)} is short on {_some(each)}"
    nodes = _some(sorted(obstacle.node for obstacle in hit))
    return f"tainted with {what}: {nodes}" if why == "taint" else f"{_WORDS[why]}: {nodes}"


def _some(each: Sequence[str]) -> str:
    more = len(each) - _SHOWN_NODES
    return ", ".join(each[:_SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")


def _coarse(resource: str, amount: Decimal) -> Decimal:
    """Rounded down, so that a message stays while small pods come and go."""
    if resource == MEMORY:
        return amount / GIB // _STEP_GIB * _STEP_GIB
    if resource == "cpu":
        return amount // _STEP_CPU * _STEP_CPU
    return amount // 1


def _free(resource: str, amount: Decimal) -> str:
    coarse = _coarse(resource, amount)
    if resource == MEMORY:
        return f"{coarse.normalize():f} GiB free" if coarse else f"less than {_STEP_GIB} GiB free"
    return "none free" if resource == PODS or not coarse else f"{coarse.normalize():f} free"


def _sums(lacking: Sequence[Fit]) -> str:
    """What each pod's memory is made of: which part to lower is seen there."""
    return "".join(f"A {fit.demand.component} pod: {fit.demand.memory}. " for fit in lacking if fit.demand.memory)


def _remedy(lacking: Sequence[Fit]) -> str:
    if all(fit.demand.component == names.ROUTER for fit in lacking):
        return "Free a node or add one, or lower router.replicas."
    return "Free a node or add one, or lower hostPoolGiB, ranksPerHost, model.weightsGiB or replicas."
