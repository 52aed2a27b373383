"""A replica of real processes: 4 ranks over 2 hosts give the tokens of one rank, and nobody outlives a failure."""

from __future__ import annotations

import functools
import json
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glm52_engine.config import Outcome
from tests.engine.model.support import Ours
from tests.engine.ranks.processes import (
    SEATS,
    Process,
    Replica,
    replica,
    write_config,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

RANKS_EACH = 2
RANKS = 2 * RANKS_EACH
BLOCKS_EACH = 4

forked_replica = functools.partial(replica, forked=True)


@pytest.fixture(scope="module")
def one_rank(tiny_checkpoint: Path) -> Ours:
    return Ours(tiny_checkpoint)


class Client:
    """Requests to a leader, spread over its ranks and seats."""

    def __init__(self, leader: Process) -> None:
        self.leader = leader
        self.asked: dict[str, tuple[list[int], int]] = {}

    blocks_each = BLOCKS_EACH

    def start(self, key: str, rank: int, seat: int, prompt: list[int], most: int) -> None:
        self.asked[key] = prompt, most
        blocks = [seat * self.blocks_each + block for block in range(self.blocks_each)]
        self.leader.tell(
            {"start": key, "rank": rank, "seat": seat, "blocks": blocks, "prompt": prompt, "max_tokens": most}
        )

    def tokens(self, key: str) -> list[int]:
        return [line["token"] for line in self._of(key) if line["token"] is not None]

    def ended(self, key: str) -> bool:
        return any(line["ended"] for line in self._of(key))

    def wait(self, *keys: str) -> None:
        self.leader.wait_until(lambda: all(self.ended(key) for key in keys), f"end {keys}")

    def _of(self, key: str) -> list[dict[str, Any]]:
        return [line for line in list(self.leader.lines) if line.get("key") == key]


def expected(one_rank: Ours, prompt: list[int], most: int) -> list[int]:
    return one_rank.greedy(prompt, most, chunk=len(prompt))[:most]


def prompt_of(seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(1, 120) for _ in range(chosen.randrange(1, 30))]


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_four_ranks_on_two_hosts_give_the_tokens_of_one(
    tmp_path: Path, tiny_checkpoint: Path, one_rank: Ours, launch_ahead: bool
) -> None:
    """Requests that come one after the other, on all ranks, some of them aborted on their way."""
    with forked_replica(tmp_path, tiny_checkpoint, ranks=RANKS_EACH, launch_ahead=launch_ahead) as made:
        leader, (host,) = made.start()
        client = Client(leader)
        keys: list[str] = []
        aborted: list[str] = []
        for wave in range(3):
            now = [f"w{wave}-{rank}-{seat}" for rank in range(RANKS) for seat in range(SEATS) if (rank + seat) % 2 == 0]
            for place, key in enumerate(now):
                _, rank, seat = key[1:].split("-")
                client.start(key, int(rank), int(seat), prompt_of(100 * wave + place), 5 + 3 * place)
            victims = now[-2:]
            leader.wait_until(lambda of=victims: all(client.tokens(key) for key in of), "answer all")
            for key in victims:
                leader.tell({"abort": key, "rank": int(key.split("-")[1])})
            client.wait(*now)
            keys += now
            aborted += victims
        for key in keys:
            tokens, whole = client.tokens(key), expected(one_rank, *client.asked[key])
            assert tokens == (whole[: len(tokens)] if key in aborted else whole), key
        assert leader.popen.stdin is not None
        leader.popen.stdin.close()
        assert leader.gone() == 0
        assert host.gone() == 0
        assert host.last_words().outcome == Outcome.DRAINED


@pytest.fixture
def busy(tmp_path: Path, tiny_checkpoint: Path) -> Iterator[tuple[Replica, Process, Process]]:
    """Two hosts in the middle of long outputs on every rank."""
    with forked_replica(tmp_path, tiny_checkpoint) as made:
        leader, (host,) = made.start()
        client = Client(leader)
        for rank in range(2):
            client.start(f"k{rank}", rank, 0, prompt_of(rank), 30)
        leader.wait_until(lambda: all(client.tokens(f"k{rank}") for rank in range(2)), "answer all")
        yield made, leader, host


def test_a_killed_host_ends_the_replica_and_is_named(busy: tuple[Replica, Process, Process]) -> None:
    made, leader, host = busy
    host.popen.send_signal(signal.SIGKILL)
    assert leader.gone() == 70
    words = leader.last_words()
    assert words.outcome == Outcome.CRASHED
    assert words.marker == "CRASH_leader"
    assert words.rank == 1
    assert f"rank host 127.0.0.1:{made.ports[0]} (rank 1)" in words.message


def test_a_killed_leader_ends_its_hosts(busy: tuple[Replica, Process, Process]) -> None:
    _, leader, host = busy
    leader.popen.send_signal(signal.SIGKILL)
    assert host.gone() == 70
    assert host.last_words().marker == "CRASH_host-1"
    assert "the leader at" in host.last_words().message


def test_a_frozen_host_ends_the_replica_and_itself_when_it_thaws(busy: tuple[Replica, Process, Process]) -> None:
    _, leader, host = busy
    host.popen.send_signal(signal.SIGSTOP)
    assert leader.gone() == 70
    assert "silent" in leader.last_words().message
    host.popen.send_signal(signal.SIGCONT)
    assert host.gone() == 70


def test_a_frozen_leader_ends_its_hosts(busy: tuple[Replica, Process, Process]) -> None:
    _, leader, host = busy
    leader.popen.send_signal(signal.SIGSTOP)
    assert host.gone() == 70
    assert "silent" in host.last_words().message
    leader.popen.send_signal(signal.SIGCONT)
    assert leader.gone() == 70


def test_a_failed_start_on_one_host_ends_all_of_them_with_its_reason(tmp_path: Path, tiny_checkpoint: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, broken)
    with forked_replica(tmp_path, tiny_checkpoint, hosts=2) as made:
        well = made.start_host(1)
        leader = made.start_leader()
        well.wait_log("leader accepted")
        (broken / "model.safetensors").unlink()
        ill = made.start_host(2, config=write_config(tmp_path / "broken.json", broken))
        reason = leader.says("failed")["failed"]
        assert f"127.0.0.1:{made.ports[1]} (rank 2)" in reason
        assert "model.safetensors" in reason
        assert leader.gone() in (70, 78)
        assert ill.gone() == 78
        assert ill.last_words().outcome == Outcome.CONFIG_REFUSED
        # Nothing has joined: what has loaded well waits for the next leader, until it is told to end.
        assert well.popen.poll() is None
        well.popen.send_signal(signal.SIGTERM)
        assert well.gone() == 0


def without_logits(checkpoint: Path, to: Path) -> Path:
    """A copy whose fingerprint is the same and whose logits are no numbers: only the first step shows it."""
    shutil.copytree(checkpoint, to)
    with (to / "model.safetensors").open("r+b") as file:
        header = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(header))["lm_head.weight"]["data_offsets"]
        # Between the bytes that the fingerprint looks at.
        file.seek(8 + header + start + (end - start) // 8 // 4 * 4)
        file.write(b"\xff" * 4096)
    return to


@pytest.mark.parametrize("ill", [0, 1])
def test_first_steps_that_fail_on_one_rank_end_all_processes(tmp_path: Path, tiny_checkpoint: Path, ill: int) -> None:
    """A GPU's capture is in these steps. The other rank waits in a collective of the next one meanwhile."""
    broken = write_config(tmp_path / "broken.json", without_logits(tiny_checkpoint, tmp_path / "broken"))
    with forked_replica(tmp_path, tiny_checkpoint) as made:
        host = made.start_host(1, config=broken if ill else None)
        leader = made.start_leader(config=None if ill else broken)
        reason = leader.says("failed")["failed"]
        assert f"rank {ill}: RuntimeError: the first forward pass gave logits that are not finite" in reason
        for process, marker in ((leader, "CRASH_leader"), (host, "CRASH_host-1")):
            assert process.gone() == 70
            assert process.last_words().outcome == Outcome.CRASHED
            assert process.last_words().marker == marker
            assert "not finite" in process.last_words().message


def test_a_leader_that_restarts_during_the_start_finds_its_host_as_it_was(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    with forked_replica(tmp_path, tiny_checkpoint, hosts=2) as made:
        first = made.start_host(1)
        leader = made.start_leader()
        first.wait_log("leader accepted")
        leader.popen.send_signal(signal.SIGKILL)
        leader.popen.wait()
        first.wait_log("leader lost")
        made.start_host(2)
        made.start_leader().says("up")
        assert first.log.read_text().count("reading weights") == 1


def test_a_host_that_restarts_is_met_by_the_next_leader(busy: tuple[Replica, Process, Process]) -> None:
    made, leader, host = busy
    host.popen.send_signal(signal.SIGKILL)
    leader.gone()
    again, hosts = made.start()
    client = Client(again)
    client.start("k", 1, 0, prompt_of(1), 4)
    client.wait("k")
    hosts[0].popen.send_signal(signal.SIGTERM)  # the leader's requests still need it
    client.start("l", 0, 0, prompt_of(1), 4)
    client.wait("l")
    assert client.tokens("l") == client.tokens("k")


def test_a_host_without_a_leader_ends_when_asked(tmp_path: Path, tiny_checkpoint: Path) -> None:
    with forked_replica(tmp_path, tiny_checkpoint) as made:
        host = made.start_host(1)
        host.wait_log("listening")
        host.popen.send_signal(signal.SIGTERM)
        assert host.gone() == 0
