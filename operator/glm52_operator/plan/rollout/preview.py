"""What a rollout would do, step by step, if every pod became ready: the planner's own answers, played through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from glm52_engine.config import Role
from glm52_operator import names
from glm52_operator.desired.target import Target
from glm52_operator.plan.rollout.planner import Policy, Replacement, plan
from glm52_operator.plan.rollout.replicas import Host, Replica, RoleView

_OLD, _NEW = "old", "new"


def preview(target: Target, *, new_kv: bool) -> Iterator[tuple[Replacement, ...]]:
    """The steps of a change that reaches the pods of both roles; `new_kv`: old and new pods cannot exchange KV."""
    views = {role: _running(target, role, kv=_NEW if new_kv else _OLD) for role in names.ROLES}
    policy = Policy(target.spec.rollout.max_unavailable)
    while step := plan(views["prefill"], views["decode"], policy).replacements:
        yield step
        for done in step:
            view = views[done.role]
            replicas = tuple(_renewed(r, view.kv) if r.index == done.replica else r for r in view.replicas)
            views[done.role] = replace(view, replicas=replicas)


def _running(target: Target, role: Role, *, kv: str) -> RoleView:
    """Every replica serves at the revision before; the newest one's KV is `kv`."""
    size = target.hosts(role)
    replicas = (Replica(n, size, tuple(_host(host) for host in range(size))) for n in range(target.wanted(role)))
    return RoleView(role, names.role(target.name, role), _NEW, kv, tuple(replicas), size)


def _host(host: int) -> Host:
    return Host("", "", "", host, revision=_OLD, kv=_OLD, ready=True, started=True, leaving=False, since="")


def _renewed(replica: Replica, kv: str) -> Replica:
    return replace(replica, hosts=tuple(replace(host, revision=_NEW, kv=kv) for host in replica.hosts))
