"""What the kubelet's words about a container's end mean."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm52_engine.config import Outcome
from glm52_operator.plan.endings import MESSAGE_LIMIT, endings
from tests.operator.builders import pod
from tests.operator.ends import BACKING_OFF, NOW, RUNNING, crashed, stamp, terminated, told, with_container


def only(made: Any) -> Any:
    (found,) = endings(made)
    return found


@pytest.mark.parametrize(
    ("ended", "reason", "says"),
    [
        pytest.param(crashed(-5, "rank 1 failed"), "Crashed", "rank 1 failed", id="said so itself"),
        pytest.param(terminated(-5, 71, message=told(Outcome.WEDGED, "no step")), "Wedged", "no step", id="wedged"),
        pytest.param(terminated(-5, 137, reason="OOMKilled"), "OOMKilled", "memory limit", id="out of memory"),
        pytest.param(terminated(-5, 137, message="last line"), "Killed", "killed by SIGKILL\nlast line", id="killed"),
        pytest.param(terminated(-5, 134), "Killed", "SIGABRT", id="native abort"),
        pytest.param(terminated(-5, 1, message="Traceback"), "Crashed", "exit code 1\nTraceback", id="no words"),
        pytest.param(terminated(-5, 0, reason="Completed"), "EndedUnasked", "nobody had told", id="exit 0"),
        pytest.param(terminated(-5, 0, message=told(Outcome.DRAINED)), "EndedUnasked", "a probe failed", id="TERM"),
        pytest.param(
            terminated(-5, 75, message=told(Outcome.DRAIN_TIMED_OUT)), "EndedUnasked", "because", id="TERM, late"
        ),
        pytest.param(
            terminated(-5, 137, reason="ContainerStatusUnknown", containerID=None),
            "ContainerStatusUnknown",
            "SIGKILL",
            id="lost",
        ),
    ],
)
def test_an_end_that_nobody_asked_for_is_a_crash(ended: Any, reason: str, says: str) -> None:
    found = only(with_container("chat-decode-0", RUNNING, ended))
    assert (found.reason, found.is_crash, found.asked) == (reason, True, False)
    assert says in found.message
    assert (found.pod, found.node, found.revision) == ("chat-decode-0", "worker", "r1")


KUBELET_BYTES = 2048
"""Of the end of a log, which the kubelet takes for a message where there is none."""

FALLS = """
import ctypes, sys, threading
from glm52_engine.lifecycle.termination import tell_native_end
from glm52_engine.transfer.agent import TransferAgent
from tests.engine.serve.fakes import FakePool

class Falls:
    def getNotifs(self, *_):
        ctypes.CDLL(None).abort()

tell_native_end()
for _ in range(8):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
agent = TransferAgent("prefill/1", [FakePool(1)], on_notice=lambda notice: None, expects=lambda: FALLING.is_set())
FALLING = threading.Event()
agent.start()
if sys.argv[1] == "transport":
    agent._nixl.agent = Falls()
    FALLING.set()
    threading.Event().wait()
ctypes.CDLL(None).abort()
"""


@pytest.mark.parametrize("where", ["transport", "elsewhere"])
def test_a_native_end_within_the_kv_transport_is_called_that(where: str) -> None:
    root = Path(__file__).parents[2]
    fell = subprocess.run(
        [sys.executable, "-c", FALLS, where],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'engine'}:{root}"},
        stderr=subprocess.PIPE,
        timeout=60,
    )
    assert fell.returncode == -signal.SIGABRT, fell.stderr.decode()
    # An engine has loaded more modules than this process.
    log = fell.stderr.decode().rstrip() + ", torch._C" * 40
    found = only(with_container("chat-prefill-0", RUNNING, terminated(-5, 134, message=log[-KUBELET_BYTES:])))
    assert found.reason == "Killed"
    assert ("killed by SIGABRT in the KV transport" in found.message) is (where == "transport")


def test_the_kv_transport_on_another_threads_stack_says_nothing_of_a_native_end() -> None:
    log = """Thread 0x00007fb7ca1fe6c0 (most recent call first):
  File "/site-packages/nixl_cu13/_api.py", line 796 in get_new_notifs

Current thread 0x00007fb888ca7b80 (most recent call first):
  File "/site-packages/torch/cuda/__init__.py", line 900 in synchronize

Thread 0x00007fb7ca9ff6c0 (most recent call first):
  File "/site-packages/nixl_cu13/_api.py", line 796 in get_new_notifs
"""
    found = only(with_container("chat-prefill-0", RUNNING, terminated(-5, 139, message=log)))
    assert "killed by SIGSEGV\n" in found.message


def test_a_refused_configuration_is_no_crash() -> None:
    ended = terminated(-5, 78, message=told(Outcome.CONFIG_REFUSED, "no config.json"))
    assert not only(with_container("chat-decode-0", BACKING_OFF, ended)).is_crash


@pytest.mark.parametrize(
    ("seconds", "crash"),
    [pytest.param(-31, True, id="before it was told to go"), pytest.param(-30, False, id="afterwards")],
)
def test_what_ends_because_the_pod_was_deleted_is_no_crash(seconds: float, crash: bool) -> None:
    made = with_container("chat-decode-0", {"terminated": terminated(seconds, 137)}, leaves=(-30, 60))
    assert only(made).is_crash is crash


@pytest.mark.parametrize(
    ("ended", "crash"),
    [
        pytest.param(terminated(-32, 0, message=told(Outcome.DRAINED)), False, id="drained"),
        pytest.param(terminated(-32, 75, message=told(Outcome.DRAIN_TIMED_OUT)), False, id="drained too long"),
        pytest.param(terminated(-32, 0), False, id="exit code 0"),
        pytest.param(terminated(-32, 143), False, id="SIGTERM"),
        pytest.param(terminated(-32, 137), True, id="killed"),
        pytest.param(terminated(-32, 0, message=told(Outcome.CRASHED)), True, id="a rank failed"),
        pytest.param(terminated(-36, 0, message=told(Outcome.DRAINED)), True, id="long before"),
    ],
)
def test_a_nodes_clock_that_is_behind_makes_no_crash_of_an_end_that_term_brought(ended: Any, crash: bool) -> None:
    """Told to go 30 seconds ago, it ended 32 seconds ago: clocks of machines differ."""
    assert only(with_container("chat-decode-0", {"terminated": ended}, leaves=(-30, 60))).is_crash is crash


@pytest.mark.parametrize(
    ("seconds", "crash"),
    [pytest.param(-66, True, id="before it can have been told to go"), pytest.param(-3, False, id="afterwards")],
)
def test_the_kubelets_own_last_deletion_is_not_when_the_pod_was_told_to_go(seconds: float, crash: bool) -> None:
    """It comes when the pod has ended, and the API server forgets the time of the one before."""
    made = with_container("chat-decode-0", {"terminated": terminated(seconds, 0)}, leaves=(0, 0))
    made["spec"]["terminationGracePeriodSeconds"] = 60
    assert only(made).is_crash is crash


def test_a_rank_that_fails_during_a_drain_is_a_crash() -> None:
    assert only(with_container("chat-decode-0", {"terminated": crashed(-5)}, leaves=(-30, 60))).is_crash


def test_pods_of_a_node_that_is_shut_down_in_order_did_not_crash() -> None:
    made = with_container("chat-decode-0", {"terminated": terminated(-5, 137)}, phase="Failed", reason="Terminated")
    assert not only(made).is_crash


def test_an_eviction_for_pressure_on_the_node_is_told_as_such() -> None:
    made = with_container(
        "chat-decode-0", {"terminated": terminated(-5, 137)}, phase="Failed", reason="Evicted", message="low on disk"
    )
    found = only(made)
    assert (found.reason, found.is_crash) == ("Evicted", True)
    assert "low on disk" in found.message


def test_a_lost_node_is_told_though_its_kubelet_is_silent() -> None:
    lost = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
        "lastTransitionTime": stamp(-7),
        "message": "Taint manager: deleting due to NoExecute taint",
    }
    found = only(with_container("chat-decode-0", RUNNING, leaves=(-7, 60), conditions=[lost]))
    assert (found.reason, found.node, found.exit_code, found.is_crash) == ("NodeLost", "worker", None, True)


def test_an_init_container_that_is_done_has_not_ended_but_one_that_fails_has() -> None:
    done = {"name": "make-checkpoint", "state": {"terminated": terminated(-9, 0)}}
    failed = {"name": "make-checkpoint", "state": BACKING_OFF, "lastState": {"terminated": terminated(-9, 1)}}
    assert endings(pod("chat-decode-0", initContainerStatuses=[done])) == []
    assert only(pod("chat-decode-0", initContainerStatuses=[failed])).is_crash


def test_the_same_end_has_the_same_id_wherever_it_stands_and_no_other_has() -> None:
    first, second = crashed(-50), crashed(-5)
    ended = only(with_container("chat-decode-0", {"terminated": first}))
    waits = only(with_container("chat-decode-0", BACKING_OFF, first))
    runs = only(with_container("chat-decode-0", RUNNING, first))
    both = endings(with_container("chat-decode-0", {"terminated": second}, first))
    assert ended.id == waits.id == runs.id == both[0].id
    assert len({each.id for each in both}) == 2
    other = with_container("chat-decode-0", {"terminated": first})
    other["metadata"]["uid"] = "another"
    assert only(other).id != ended.id


def test_of_a_long_log_the_end_is_kept() -> None:
    log = tuple(f"line {number}" for number in range(400))
    found = only(with_container("chat-decode-0", RUNNING, crashed(-5, "boom", log=log)))
    assert len(found.message) <= MESSAGE_LIMIT
    assert found.message.startswith("container engine: boom\nline ")
    assert found.message.endswith("line 399")


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"containerStatuses": None},
        {"containerStatuses": [{"name": "engine"}]},
        {"containerStatuses": [{"name": "engine", "state": None, "lastState": {}}]},
        {"containerStatuses": [{"name": "engine", "state": {"terminated": {"exitCode": 9, "finishedAt": "soon"}}}]},
        {"containerStatuses": [{"name": "engine", "state": {"terminated": {"exitCode": 4000, "finishedAt": None}}}]},
        {"conditions": None},
    ],
)
def test_half_written_objects_do_no_harm(odd: Any) -> None:
    made = pod("chat-decode-0")
    made["status"] = odd
    assert all(ending.time <= NOW for ending in endings(made))


def test_a_container_that_never_ran_has_no_end() -> None:
    """What a kubelet writes of a pod that is deleted while its image cannot be pulled."""
    lost = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "could not be located", "finishedAt": None}
    made = with_container("chat-decode-0", {"terminated": lost}, leaves=(-1, 30))
    (engine,) = made["status"]["containerStatuses"]
    made["status"]["initContainerStatuses"] = [{**engine, "name": "make-checkpoint", "restartCount": 0}]
    engine["restartCount"] = 0
    assert endings(made) == []
    engine["restartCount"] = 1
    assert [end.is_crash for end in endings(made)] == [True]
