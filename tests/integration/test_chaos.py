"""The operator is killed at any moment: what it leaves half done, the next one finishes."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from e2e.controlplane.audit import Audit
from e2e.controlplane.cluster import Late
from e2e.controlplane.operator import Installed
from e2e.controlplane.space import Space, deployment

CHILDREN = 10
"""Of one deployment, with its Secret; and a budget for each component of several pods."""


def edits(dice: random.Random, names: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """A burst of what users do."""
    return [
        (
            dice.choice(names),
            dice.choice(
                [
                    {"decode": {"replicas": dice.randint(1, 3)}},
                    {"prefill": {"replicas": dice.randint(1, 2)}},
                    {"drain": {"windowSeconds": dice.randint(0, 9)}},
                    {"router": {"replicas": dice.randint(1, 2)}},
                    {"model": {"maxModelLen": dice.choice([1024, 2048])}},
                ]
            ),
        )
        for _ in range(8)
    ]


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_points_it_converges(space: Space, installed: Installed, seed: int) -> None:
    dice = random.Random(seed)
    names = ["a", "b", "c"]
    operator = installed.start()
    for name in names:
        space.apply(deployment(name))
    for _ in range(4):
        audit = installed.audit()
        for name, spec in edits(dice, names):
            space.edit(name, **spec)
        until_writes(space, audit, dice.randint(1, 12))
        operator.kill()
        operator.start()
    for name in names:
        space.until_ready(name, timeout=180.0)
        # What was scaled away may still leave, and how it ended is told then.
        space.until_condition(name, "Draining", status="False")
    assert_whole(space, names)
    # What a process that was never interrupted would have made: it finds nothing to do.
    operator.kill()
    audit = installed.audit()
    operator.start()
    space.apply(deployment("last"))
    space.until_ready("last")
    about = [r for r in audit.since() if r.is_write and r.resource != "leases" and not r.name.startswith("last")]
    assert [str(r) for r in about] == []


def until_writes(space: Space, audit: Audit, number: int) -> None:
    """In the middle of a pass, and of another one each time. With less to do there are fewer writes: then at rest."""

    def made() -> bool:
        return sum(request.is_write and request.resource != "leases" for request in audit.since()) >= number

    with contextlib.suppress(Late):
        space.until("it is at work", made, timeout=3)


def assert_whole(space: Space, names: list[str]) -> None:
    """Each deployment has each child once, and nothing belongs to nobody."""
    owners = {name: space.get("GLM52Deployment", name) for name in names}
    for name in names:
        mine = owners[name]
        assert mine is not None
        children = space.children(name)
        several = [
            part for part in ("prefill", "decode", "router") if mine["spec"].get(part, {}).get("replicas", 1) > 1
        ]
        budgets = [child for child in children if child.startswith("PodDisruptionBudget/")]
        assert sorted(budgets) == sorted(f"PodDisruptionBudget/{name}-{part}" for part in several)
        assert len(children) - len(budgets) == CHILDREN, sorted(children)
        for obj in children.values():
            (owner,) = obj["metadata"]["ownerReferences"]
            assert owner["uid"] == mine["metadata"]["uid"]
