"""A rollout under everything at once: edits, reverts, scaling, pauses, faults, and an operator that dies in between."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm52_engine.config import Role
from glm52_operator.plan.rollout import Replacement, State
from tests.operator.simulated import Revision, SimCluster

ROLES = st.sampled_from(["prefill", "decode"])
KVS = st.sampled_from(["a", "b", "c"])
SIZES = st.integers(1, 4)


class Rollout(RuleBasedStateMachine):
    """The operator may never make things worse than its promises; the rest of the world may."""

    @initialize(prefill=SIZES, decode=SIZES, hosts=st.integers(1, 3), most=st.integers(1, 2))
    def running(self, prefill: int, decode: int, hosts: int, most: int) -> None:
        self.cluster = SimCluster.running(prefill, decode, hosts=hosts, max_unavailable=most)
        self.revisions = [self.cluster.sets["decode"].revision]

    # The user.

    @rule(kv=KVS, broken=st.booleans(), roles=st.sampled_from([("prefill", "decode"), ("prefill",), ("decode",)]))
    def edit(self, kv: str, broken: bool, roles: tuple[Role, ...]) -> None:
        if len(roles) == 1:
            # What one role alone has changed in is no part of the KV.
            kv = self.cluster.sets[roles[0]].revision.kv
        self.revisions.append(Revision(f"r{len(self.revisions)}", kv, broken))
        self.cluster.edit(self.revisions[-1], *roles)

    @rule(data=st.data())
    def revert(self, data: st.DataObject) -> None:
        self.cluster.edit(data.draw(st.sampled_from(self.revisions)))

    @rule(role=ROLES, replicas=st.integers(0, 5))
    def scale(self, role: Role, replicas: int) -> None:
        self.cluster.sets[role].replicas = replicas

    @rule(most=st.integers(1, 3), paused=st.booleans())
    def policy(self, most: int, paused: bool) -> None:
        self.cluster.max_unavailable, self.cluster.paused = most, paused

    # The cluster.

    @rule()
    def controllers(self) -> None:
        self.cluster.make()

    @rule(role=ROLES, data=st.data())
    def kubelet(self, role: Role, data: st.DataObject) -> None:
        pods = self.cluster.sets[role].pods
        if pods:
            self.cluster.advance(role, data.draw(st.sampled_from(sorted(pods))))

    @rule()
    def everything_settles(self) -> None:
        self.cluster.turn()

    @rule(role=ROLES, what=st.sampled_from(["falters", "crashes", "is evicted", "vanishes"]), data=st.data())
    def fault(self, role: Role, what: str, data: st.DataObject) -> None:
        pods = self.cluster.sets[role].pods
        if not pods:
            return
        ordinal = data.draw(st.sampled_from(sorted(pods)))
        pod = pods[ordinal]
        if what == "vanishes":
            del pods[ordinal]
        elif what == "is evicted":
            pod.leaving = True
        else:
            pod.ready = False
            pod.started &= what == "falters"

    # The operator.

    @rule(dies_after=st.none() | st.integers(0, 3))
    def operator(self, dies_after: int | None) -> None:
        """One pass, or the first few pods of one."""
        left = 99 if dies_after is None else dies_after
        for replacement in self.cluster.plan().replacements:
            self._send_off(replacement, left)
            left -= len(replacement.hosts)
            if left <= 0:
                return
        if dies_after is None:
            assert not self.cluster.plan().replacements, "a second pass finds nothing more to do"

    def _send_off(self, replacement: Replacement, left: int) -> None:
        cluster = self.cluster
        each = cluster.sets[replacement.role]
        assert not cluster.paused
        assert all(host.revision != each.revision.name for host in replacement.hosts), "what is newest stays"
        floor = each.replicas - cluster.max_unavailable
        pairs, serving = cluster.pairs(), len(cluster.serving(replacement.role))
        cluster.carry_out(replacement, hosts=left)
        if replacement.state is State.SERVING and left:
            assert serving - 1 >= floor, "a replica that serves went below the floor"
        else:
            assert len(cluster.serving(replacement.role)) == serving, "what did not serve costs nothing"
        if pairs and min(s.replicas for s in cluster.sets.values()) > 1:
            assert cluster.pairs(), "the last pair that can exchange KV went"

    @invariant()
    def progress_is_told(self) -> None:
        found = self.cluster.plan()
        for role, progress in found.progress.items():
            assert self.cluster.sets[role].replicas == progress.wanted >= progress.newest >= 0
            assert not progress.outdated or found.replacements or progress.waits

    @precondition(lambda self: self.revisions)
    @rule(kv=KVS)
    def it_ends_when_pods_can_become_ready(self, kv: str) -> None:
        """Whatever has happened: with a revision that starts, and peace, everything is of that revision in the end."""
        self.revisions.append(Revision(f"r{len(self.revisions)}", kv))
        self.cluster.edit(self.revisions[-1])
        self.cluster.paused = False
        # Each round replaces at least one replica of one role, or waits for one.
        self.cluster.run(rounds=4 + 3 * sum(each.replicas for each in self.cluster.sets.values()))


TestRollout = Rollout.TestCase
TestRollout.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
