"""The next step of a rollout: which pods make room for their successors now, and what the others wait for.

Nothing is remembered from step to step. What is decided follows from the pods that are there, so an edit, a revert, a
change of scale or a new operator process in the middle needs no case of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from glm52_engine.config import Role
from glm52_operator import names
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.rollout.replicas import Host, Replica, RoleView, State, view


@dataclass(frozen=True, slots=True)
class Policy:
    max_unavailable: int = 1
    """Replicas of one role that may be missing at a time, whatever the cause."""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Replacement:
    """The hosts of one replica that go now, all together; their drain is the pods' own affair."""

    role: Role
    replica: int
    hosts: tuple[Host, ...]
    state: State
    """What the replica is before: one that serves is evicted, so that disruption budgets have a say."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one role is."""

    wanted: int
    newest: int
    """Replicas of which every host is of the newest revision."""
    outdated: tuple[str, ...]
    """Pods of an older revision that nobody has told to go yet."""
    waits: str = ""
    """What they wait for, as the rest of a sentence; empty where they do not wait."""
    absent: str = ""
    """Why the first replica that does not serve does not, in the same form."""


@dataclass(frozen=True, slots=True)
class Plan:
    replacements: tuple[Replacement, ...] = ()
    progress: Mapping[Role, Progress] = field(default_factory=dict)
    views: Mapping[Role, RoleView] = field(default_factory=dict)
    """What it was decided from."""


@dataclass(slots=True)
class _Slot:
    """A replica during the planning: `take` makes it what its replacement will be at first."""

    replica: Replica
    state: State
    newest: bool
    kv: str | None


def _slot(replica: Replica, view: RoleView) -> _Slot:
    state, newest = replica.state, view.revision is None or not replica.outdated(view.revision)
    # What is on its way counts as what it will be, however far it is.
    return _Slot(replica, state, newest, view.kv if newest and state is not State.SERVING else replica.kv)


class _Board:
    """One role during the planning."""

    def __init__(self, view: RoleView) -> None:
        self.view = view
        self.slots = [_slot(replica, view) for replica in view.replicas]

    def take(self, slot: _Slot) -> Replacement:
        before = slot.state
        slot.state, slot.newest, slot.kv = State.DOWN, True, self.view.kv
        hosts = slot.replica.outdated(self.view.revision or "")
        return Replacement(self.view.role, slot.replica.index, hosts, before)

    def outdated(self, state: State) -> list[_Slot]:
        return [slot for slot in self.slots if slot.state is state and not slot.newest]

    def serving(self) -> Counter[str | None]:
        """KV fingerprint → replicas that serve with it."""
        return Counter(slot.kv for slot in self.slots if slot.state is State.SERVING)

    def count(self, state: State) -> int:
        return sum(slot.state is state for slot in self.slots)

    @property
    def converted(self) -> int:
        """Replicas whose KV is, or will be, that of the newest revision."""
        return sum(slot.kv == self.view.kv for slot in self.slots)

    @property
    def moving(self) -> bool:
        """Whether a replica of the newest revision is not serving yet."""
        return any(slot.newest and slot.state is not State.SERVING for slot in self.slots)


def plan(prefill: RoleView, decode: RoleView, policy: Policy) -> Plan:
    """What to do now; empty replacements where everything is newest, or has to wait."""
    boards = (_Board(prefill), _Board(decode))
    chosen: list[Replacement] = []
    if not policy.paused:
        for board in boards:
            chosen += _spoilt(board, policy)
        chosen += _serving(boards, policy)
    pairs = zip(boards, reversed(boards), strict=True)
    return Plan(
        replacements=tuple(chosen),
        progress={own.view.role: _progress(own, other, policy) for own, other in pairs},
        views={board.view.role: board.view for board in boards},
    )


def plan_for(
    target: Target,
    workloads: Mapping[names.Component, Object | None],
    pods: Mapping[names.Component, Sequence[Object]],
) -> Plan:
    """The same from a specification and from objects as the cluster shows them."""
    prefill, decode = (view(role, target, workloads.get(role), pods.get(role, ())) for role in names.ROLES)
    rollout = target.spec.rollout
    return plan(prefill, decode, Policy(rollout.max_unavailable, rollout.paused))


def _spoilt(board: _Board, policy: Policy) -> Iterator[Replacement]:
    """Replicas that do not serve. A revision that cannot start is left that way, without waiting for anything."""
    for slot in board.outdated(State.DOWN):
        yield board.take(slot)
    # These may come back by themselves: if a fault of the network made all of them unready at once, replacing all at
    # once would turn a minute's trouble into the time that it takes to load the model.
    for slot in board.outdated(State.FALTERING):
        if board.count(State.DOWN) < policy.max_unavailable:
            yield board.take(slot)


def _serving(boards: tuple[_Board, _Board], policy: Policy) -> Iterator[Replacement]:
    """Replicas that serve, one after the other while each role keeps its floor and a pair that understands itself."""
    while (found := _next(boards, policy, last_resort=False)) is not None:
        yield found
    if not any(board.moving for board in boards):
        # A role of one replica cannot be replaced without a gap: once it is begun, the other roles need not wait.
        while (found := _next(boards, policy, last_resort=True)) is not None:
            yield found


def _next(boards: tuple[_Board, _Board], policy: Policy, *, last_resort: bool) -> Replacement | None:
    # The role that is further behind comes first, so that both have gone the same part of the way.
    for own, other in sorted(zip(boards, reversed(boards), strict=True), key=lambda pair: _way(pair[0])):
        if len(own.slots) - own.count(State.SERVING) >= policy.max_unavailable:
            continue
        # Lowest first: scaling down takes the highest, and what remains then is newest.
        for slot in _one_of_each_kv(own.outdated(State.SERVING)):
            if not _keeps_step(own, other, slot, policy):
                continue
            if _keeps_pair(own, other, slot) or (last_resort and _gap_is_short(own, other)):
                return own.take(slot)
    return None


def _one_of_each_kv(slots: Iterable[_Slot]) -> Iterable[_Slot]:
    """The first of each: whether one may go depends on nothing else, and a role may have a thousand."""
    firsts: dict[str | None, _Slot] = {}
    for slot in slots:
        firsts.setdefault(slot.kv, slot)
    return firsts.values()


def _way(board: _Board) -> float:
    return (sum(slot.newest for slot in board.slots) + 0.5) / max(1, len(board.slots))


def _keeps_step(own: _Board, other: _Board, slot: _Slot, policy: Policy) -> bool:
    """Whether the roles advance together: what one has ready in a new KV is of no use without the other's."""
    if slot.kv == own.view.kv or not other.slots:
        return True
    here, there = len(own.slots), len(other.slots)
    follows = other.serving()[own.view.kv] * here // there
    # What one replica there is worth may go ahead of it, or what may be absent anyway, but never more than half.
    ahead = min(max(-(-here // there), policy.max_unavailable), max(1, here // 2))
    return own.converted < follows + ahead


def _keeps_pair(own: _Board, other: _Board, slot: _Slot) -> bool:
    """Whether a prefill and a decode replica that can exchange KV are left; true where there is none to lose."""
    mine, theirs = own.serving(), other.serving()
    if not mine.keys() & theirs.keys():
        return True
    mine[slot.kv] -= 1
    return any(mine[kv] > 0 for kv in theirs)


def _gap_is_short(own: _Board, other: _Board) -> bool:
    """Whether the last pair may go, since what comes in its place finds its counterpart as soon as it is ready."""
    waits_for_us = len(other.slots) == 1 and other.view.kv == own.view.kv
    return other.serving()[own.view.kv] > 0 or waits_for_us


def _progress(own: _Board, other: _Board, policy: Policy) -> Progress:
    revision = own.view.revision or ""
    outdated = [host.name for replica in own.view.replicas for host in replica.outdated(revision)]
    left = any(not slot.newest for slot in own.slots)
    return Progress(
        wanted=len(own.slots),
        newest=sum(slot.replica.is_of(revision) for slot in own.slots),
        outdated=tuple(outdated) if own.view.revision is not None else (),
        waits=_waits(own, other, policy) if left else "",
        absent=_first_absent(own),
    )


def _waits(own: _Board, other: _Board, policy: Policy) -> str:
    if policy.paused:
        return "rollout.paused is true"
    if ours := _first_absent(own):
        return f"{ours}; rollout.maxUnavailable is {policy.max_unavailable}"
    if theirs := _first_absent(other):
        reason = f"{own.view.role} and {other.view.role} advance together, since their revisions cannot exchange KV"
        return f"{theirs}; {reason}"
    return f"the {other.view.role} replicas are not of a revision whose KV the new {own.view.role} replicas understand"


def _first_absent(board: _Board) -> str:
    return next((_absent(board.view, slot) for slot in board.slots if slot.state is not State.SERVING), "")


def _absent(view: RoleView, slot: _Slot) -> str:
    """Why a replica does not serve."""
    by_name = {host.name: host for host in slot.replica.hosts}
    for name in view.names_of(slot.replica):
        host = by_name.get(name)
        if host is None:
            return f"{name} has to be made again"
        if host.leaving:
            return f"{name} finishes its requests and goes"
    taken = slot.replica.outdated(view.revision or "") if slot.newest else ()
    if taken:
        return f"{taken[0].name} is told to go"
    late = next((host for host in slot.replica.hosts if not host.ready), slot.replica.hosts[0])
    since = f" since {late.since}" if late.since else ""
    return f"{late.name} has not been ready{since}"
