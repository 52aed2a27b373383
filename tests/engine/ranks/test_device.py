"""Replicas of real processes whose ranks run a GPU's code: the tokens of one rank, and an end with its reason.

Steps are eager here, in Triton's interpreter. That graphs hold the collectives only GPUs can show: bench/experts.py.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from glm52_engine.checkpoint.architectures import tiny_config
from glm52_engine.config import DrainConfig, EngineConfig, HiSparseConfig, ModelConfig, Outcome, RoleConfig
from glm52_engine.model import Span
from glm52_engine.tokenizer import decodable_bound
from tests.engine.checkpoint.support import random_tensors, write
from tests.engine.model.support import Ours, prompt
from tests.engine.ranks import test_serving
from tests.engine.ranks.processes import LOOPBACK, SEATS, Replica, replica
from tests.engine.ranks.test_processes import Client, without_logits

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

BLOCK, BLOCKS_EACH = 4, 10
RANKS_EACH = 2
RANKS = 2 * RANKS_EACH
MODEL = {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "full", "shared"],
    "index_skip_topk_offset": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "index_topk": 8,
    "index_n_heads": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
}
"""Six experts over four ranks: one, two, one, two."""


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config() | MODEL
    made = write(tmp_path_factory.mktemp("device") / "m", config, random_tensors(config))
    for file in tiny_checkpoint.iterdir():
        if not (made / file.name).exists():
            shutil.copy(file, made)
    return made


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path) -> Ours:
    return Ours(checkpoint)


def through(**faults: Any) -> Sequence[str]:
    return ("tests.engine.ranks.interpreted", json.dumps(faults))


def on_device(made: Replica, checkpoint: Path, ranks: int = RANKS_EACH) -> Replica:
    role = RoleConfig(ranks_per_host=ranks, host_pool_gib=1, max_num_seqs=SEATS)
    made.config.write_text(config_of(checkpoint, role, role).model_dump_json())
    return made


def expected(one_rank: Ours, ids: Sequence[int], most: int, bound: int) -> list[int]:
    """Of ids below `bound`: random weights like those best that no tokenizer knows."""
    tokens: list[int] = []
    logits = one_rank.prefill(ids, chunk=len(ids))
    for position in range(len(ids), len(ids) + most):
        tokens.append(int(logits[:bound].argmax()))
        logits = one_rank.step([Span(0, position, tokens[-1:], True)])[0]
    return tokens


def config_of(checkpoint: Path, prefill: RoleConfig, decode: RoleConfig) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(name="m", path=str(checkpoint), max_model_len=BLOCK * BLOCKS_EACH, weights_gib=1),
        accelerator="nvidia",
        prefill=prefill,
        decode=decode,
        drain=DrainConfig(window_seconds=10),
        block_size=BLOCK,
    )


class Requests(Client):
    """Of a small model, and short."""

    blocks_each = BLOCKS_EACH

    def begin(self, key: str, rank: int, seat: int, length: int, most: int) -> str:
        assert length + most <= BLOCK * BLOCKS_EACH
        self.start(key, rank, seat, prompt(length, seed=rank), most)
        return key


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_four_ranks_on_two_hosts_give_the_tokens_of_one(
    tmp_path: Path, checkpoint: Path, one_rank: Ours, launch_ahead: bool
) -> None:
    """Prompts of several steps beside decodes, ranks without rows, more rows on one rank than the largest graph has;
    some requests come while others run, one is aborted."""
    with replica(tmp_path, checkpoint, ranks=RANKS_EACH, launch_ahead=launch_ahead, forked=True) as made:
        on_device(made, checkpoint)
        leader, (host,) = made.start(through=through(most_rows=2))
        client = Requests(leader)
        first = [client.begin("a", 0, 0, 13, 6), client.begin("b", 3, 1, 3, 9), client.begin("gone", 3, 0, 5, 30)]
        leader.wait_until(lambda: all(client.tokens(key) for key in first), "answer all")
        second = [client.begin("c", 3, 2, 9, 3), client.begin("d", 1, 0, 2, 4)]
        leader.wait_until(lambda: client.tokens("c"), "answer the later one")
        leader.tell({"abort": "gone", "rank": 3})
        client.wait(*first, *second)
        alone = client.begin("e", 2, 3, 1, 5)
        client.wait(alone)
        for key in (*first, *second, alone):
            asked, most = client.asked[key]
            whole = expected(one_rank, asked, most, decodable_bound(checkpoint))
            tokens = client.tokens(key)
            assert tokens == (whole[: len(tokens)] if key == "gone" else whole), key
        assert len(client.tokens("gone")) < 30
        assert leader.popen.stdin is not None
        leader.popen.stdin.close()
        assert all((steps > 3) == launch_ahead for steps in leader.says("ahead")["ahead"])
        assert leader.gone() == 0
        assert host.gone() == 0
        assert host.last_words().outcome == Outcome.DRAINED


def test_a_gpu_without_room_for_its_graphs_ends_all_hosts_with_what_it_holds(tmp_path: Path, checkpoint: Path) -> None:
    """One rank beside it waits for its capture, those of the other host are in the collectives of the next graph."""
    with replica(tmp_path, checkpoint, ranks=RANKS_EACH, forked=True) as made:
        on_device(made, checkpoint)
        host = made.start_host(1, through=through(full=3))
        leader = made.start_leader(through=through())
        reason = leader.says("failed")["failed"]
        assert f"127.0.0.1:{made.ports[0]} (ranks 2 to 3): rank 3: the 80 GiB of its GPU do not hold" in reason
        assert "graphs: 3.00 GiB more were asked for" in reason
        for process in (leader, host):
            assert process.gone() == 78
            assert process.last_words().outcome == Outcome.CONFIG_REFUSED
            assert "do not hold" in process.last_words().message


def test_a_gpu_without_room_for_its_kv_is_told_before_the_ranks_meet(tmp_path: Path, checkpoint: Path) -> None:
    with replica(tmp_path, checkpoint, forked=True) as made:
        on_device(made, checkpoint, ranks=1)
        host = made.start_host(1, through=through(free_gib=0))
        leader = made.start_leader(through=through())
        assert "host_pool_gib: found 1: the GPU of rank 1 keeps the same blocks" in leader.says("failed")["failed"]
        assert host.gone() == 78
        assert leader.gone() in (70, 78)


def test_first_steps_without_logits_end_all_processes(tmp_path: Path, checkpoint: Path) -> None:
    """The leader waits in the next step's collectives."""
    with replica(tmp_path, checkpoint, forked=True) as made:
        on_device(made, without_logits(checkpoint, tmp_path / "broken"), ranks=1)
        broken = made.config.rename(tmp_path / "broken.json")
        on_device(made, checkpoint, ranks=1)
        host = made.start_host(1, config=broken, through=through())
        leader = made.start_leader(through=through())
        reason = leader.says("failed")["failed"]
        assert "rank 1: RuntimeError: the first forward pass gave logits that are not finite" in reason
        for process in (leader, host):
            assert process.gone() == 70
            assert "not finite" in process.last_words().message


def test_a_lost_gpu_of_a_rank_host_ends_the_replica_by_its_name(tmp_path: Path, checkpoint: Path) -> None:
    """In the middle of an output, whose next token might be wrong."""
    lost = tmp_path / "lost"
    with replica(tmp_path, checkpoint, forked=True) as made:
        on_device(made, checkpoint, ranks=1)
        host = made.start_host(1, through=through(lost=str(lost)))
        leader = made.start_leader(through=through())
        leader.says("up")
        client = Requests(leader)
        client.begin("a", 1, 0, 3, 30)
        leader.wait_until(lambda: client.tokens("a"), "answer")
        lost.touch()
        for each in (host, leader):
            assert each.gone() == 70
            words = each.last_words()
            assert (words.outcome, words.rank, words.consequence) == (Outcome.CRASHED, 1, False)
            assert "rank 1: GpuFailed: GPU-1: the GPU fell off the bus" in words.message


class Deployment(test_serving.Deployment):
    """Prefill in one pod with two ranks; decode on two hosts with one rank each, whose hot buffers have two rows more
    than a step reads of a request."""

    through = through()

    def start(self) -> None:
        common: dict[str, Any] = {"host_pool_gib": 1, "max_num_seqs": SEATS}
        hot = HiSparseConfig(mode="always", device_buffer_size=MODEL["index_topk"] + 2)
        config = config_of(
            self.checkpoint,
            RoleConfig(ranks_per_host=2, **common),
            RoleConfig(ranks_per_host=1, hi_sparse=hot, **common),
        )
        (self.folder / "config.json").write_text(config.model_dump_json())
        self._start("decode-1", "rank-host", "--role", "decode", "--hosts", "2", "--host-index", "1")
        self._serve("decode-0", "serve", "--role", "decode", "--rank-host", f"{LOOPBACK}:{self.ports['decode-1']}")
        self._serve("prefill-0", "serve", "--role", "prefill")
        self._serve("router", "router", "--prefill-url", self.url("prefill-0"), "--decode-url", self.url("decode-0"))

    @property
    def checkpoint(self) -> Path:
        return self.folder / "m"


def test_prefill_on_the_ranks_of_one_pod_and_decode_with_hot_buffers_on_those_of_two(
    tmp_path: Path, checkpoint: Path, one_rank: Ours
) -> None:
    """Whole pods behind a router, and KV that crosses between them; all ends in order."""
    shutil.copytree(checkpoint, tmp_path / "m")
    bound = decodable_bound(checkpoint)
    wanted = {}
    for seed in range(20):
        ids = prompt(5 + seed, seed=seed)
        said = expected(one_rank, ids, 6, bound)
        if max(said) < 256 and len(wanted) < 4:  # ids of bytes: the others are no text
            wanted[tuple(ids)] = bytes(said).decode(errors="replace")
    made = Deployment(tmp_path, checkpoint)
    try:
        made.start()
        made.wait_until_ready()
        client = openai.OpenAI(base_url=f"{made.url('router')}/v1", api_key="none", max_retries=0, timeout=240)

        def said_of(ids: tuple[int, ...]) -> str:
            answer = client.completions.create(model="m", prompt=list(ids), max_tokens=6, temperature=0)
            return answer.choices[0].text

        with ThreadPoolExecutor(len(wanted)) as pool:
            assert dict(zip(wanted, pool.map(said_of, wanted), strict=True)) == wanted
        for name in ("prefill-0", "decode-0"):
            made.processes[name].popen.send_signal(signal.SIGTERM)
        for name in ("prefill-0", "decode-0", "decode-1"):
            assert made.processes[name].gone(30) == 0
            assert made.processes[name].last_words().outcome == Outcome.DRAINED
    finally:
        made.end()
