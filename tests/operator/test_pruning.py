"""Children that are wanted no longer go, and nothing else does: pods stay, and keep what they still use."""

from __future__ import annotations

from glm52_operator.desired.budgets import _budget
from glm52_operator.desired.services import _hosts_service
from glm52_operator.desired.target import Object
from glm52_operator.plan.changes import stamp
from glm52_operator.plan.pruning import is_used
from glm52_operator.reconcile.kinds import BY_KIND, POD
from tests.operator.builders import pod, target
from tests.operator.conftest import FakeClock
from tests.operator.world import World, new_world

SEVERAL = ["serve", "--role", "decode", "--hosts", "2", "--domain", "chat-decode-hosts.ns.svc"]


def of_several(name: str, role: str = "decode") -> Object:
    found = pod(name, role=role, ready=True)
    found["spec"]["containers"][0]["args"] = SEVERAL
    return found


def add(world: World, *children: Object) -> None:
    for child in children:
        world.api.put(BY_KIND[child["kind"]], stamp(child))


async def test_an_operator_before_made_more_and_that_goes_without_a_restart_of_any_pod(clock: FakeClock) -> None:
    world = new_world(clock)
    await world.run()
    world.serve()
    await world.run()
    budgets = [_budget(target(), component) for component in ("prefill", "decode", "router")]
    services = [_hosts_service(target(), role) for role in ("prefill", "decode")]
    add(world, *budgets, *services)
    await world.run()
    assert sorted(world.api.writes) == [
        *(("delete", "PodDisruptionBudget", f"chat-{each}") for each in ("decode", "prefill", "router")),
        *(("delete", "Service", f"chat-{each}-hosts") for each in ("decode", "prefill")),
    ]


async def test_hosts_of_a_revision_before_keep_the_service_that_they_find_each_other_by(clock: FakeClock) -> None:
    world = new_world(clock)
    await world.run()
    add(world, _hosts_service(target(), "decode"))
    world.api.put(POD, of_several("chat-decode-0"))
    await world.run()
    assert [write for write in world.api.writes if write[0] == "delete"] == []
    world.api.put(POD, pod("chat-decode-0", ready=True))
    await world.run()
    assert ("delete", "Service", "chat-decode-hosts") in world.api.writes


def test_the_other_roles_pods_and_other_children_do_not_count() -> None:
    service = _hosts_service(target(), "decode")
    assert is_used(service, target(), [of_several("chat-decode-0")])
    assert not is_used(service, target(), [of_several("chat-prefill-0", role="prefill")])
    assert not is_used(_budget(target(), "decode"), target(), [of_several("chat-decode-0")])
