"""What a specification asks for is worked out once, and no more of it than is needed before the first write."""

from __future__ import annotations

import pytest

from glm52_operator.desired import children
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.resolve import Invalid
from glm52_operator.reconcile import wanted
from glm52_operator.reconcile.wanted import KEPT, Resolver, Wanted
from tests.operator.builders import IMAGE, resource
from tests.operator.conftest import FakeClock
from tests.operator.world import KEY, new_world


async def test_a_scale_is_written_before_anything_else_is_built(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world(clock)
    await world.run()
    world.edit(decode={"replicas": 3})
    await world.list_all()
    written: list[str] = []
    build_others = children.build_others

    def build(target: Target) -> list[Object]:
        written.extend(map(str, world.api.calls))
        return build_others(target)

    monkeypatch.setattr(wanted, "build_others", build)
    await world.reconciler.reconcile(KEY, 0)
    assert len(written) == 1
    assert "chat-decode" in written[0]


async def test_a_pass_without_an_edit_builds_nothing(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    world = new_world(clock)
    await world.run()
    world.serve()
    monkeypatch.setattr(wanted, "build_engines", lambda target: pytest.fail("built again"))
    monkeypatch.setattr(wanted, "build_others", lambda target: pytest.fail("built again"))
    await world.run()
    assert world.condition("Ready")["status"] == "True"


def test_an_edit_is_read_though_the_object_is_known() -> None:
    resolver = Resolver(IMAGE)
    before = resolver.resolve(resource())
    after = resolver.resolve(resource(decode={"replicas": 7}))
    assert isinstance(before, Wanted)
    assert isinstance(after, Wanted)
    assert after.target.replicas("decode") == 7
    assert resolver.resolve(resource(decode={"replicas": 7})) is after


def test_a_refused_specification_leaves_nothing_behind() -> None:
    resolver = Resolver(IMAGE)
    resolver.resolve(resource())
    assert isinstance(resolver.resolve(resource(decode={"replicas": "many"})), Invalid)
    assert isinstance(resolver.resolve(resource()), Wanted)


def test_only_the_last_ones_are_kept() -> None:
    resolver = Resolver(IMAGE)
    first = [resolver.resolve(resource(f"chat-{n}", uid=f"uid-{n}")) for n in range(KEPT)]
    resolver.resolve(resource("chat-0", uid="uid-0"))
    resolver.resolve(resource("one-more", uid="more"))
    assert resolver.resolve(resource("chat-0", uid="uid-0")) is first[0]
    assert resolver.resolve(resource("chat-1", uid="uid-1")) is not first[1]
