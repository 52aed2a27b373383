"""A path of KV that turns out slow: told once, by whom it concerns, and asked for without a word to the API server."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from glm52_engine.lifecycle.states import State, ready_probe
from glm52_engine.transfer.rates import Rates
from glm52_operator.plan.events import NOTE_LIMIT, Notice
from glm52_operator.plan.paths import LISTED, WELL, Known, Path, Reader, ends, news
from glm52_operator.reconcile import listen
from glm52_operator.reconcile.kinds import DEPLOYMENT_RESOURCE, POD
from glm52_operator.reconcile.listen import over_http
from glm52_operator.reconcile.paths import ASK_SECONDS, AT_ONCE, Paths, read
from tests.operator.asking import Pods, until
from tests.operator.builders import pod, target
from tests.operator.conftest import FakeClock
from tests.operator.world import KEY, World, new_world

ROOT = pathlib.Path(__file__).parents[2]
READER = {"d": Reader("chat-decode-0", "a")}
PEERS = frozenset({"p0", "p1"})


def path(peer: str, *, slow: bool, rate: float = 45e6, best: float = 5.2e9) -> Path:
    return Path(peer, rate, best, slow)


def told(notices: list[Notice]) -> list[str]:
    return [notice.reason for notice in notices]


def test_a_slow_path_is_told_once_with_both_ends_and_what_to_do() -> None:
    known, (notice,) = news({}, READER, PEERS, {"d": [path("p0", slow=True), path("p1", slow=False)]})
    assert (notice.type, notice.reason) == ("Warning", "TransferSlow")
    for words in ("chat-decode-0", "p0 at 45 MB/s", "5200 MB/s", "spec.kvTransfer.netDevices"):
        assert words in notice.note
    document, section = notice.note.rpartition(": ")[2].rstrip(".").split(", ")
    assert f"## {section}" in (ROOT / document).read_text().splitlines()
    assert "p1" not in notice.note
    assert news(known, READER, PEERS, {"d": [path("p0", slow=True, rate=40e6)]}) == (known, [])


def test_without_another_pod_there_is_nothing_to_compare_with() -> None:
    _, (notice,) = news({}, READER, PEERS, {"d": [path("p0", slow=True, rate=2.5e6, best=0)]})
    assert "p0 at 2.5 MB/s (no other to compare with)" in notice.note


def test_a_pod_on_a_bad_link_is_one_event_and_names_the_slowest() -> None:
    peers = [f"chat-prefill-{number}" for number in range(60)]
    said = [path(peer, slow=True, rate=1e6 + number) for number, peer in enumerate(peers)]
    known, (notice,) = news({}, READER, frozenset(peers), {"d": said[::-1]})
    assert all(f"{peer} at" in notice.note for peer in peers[:LISTED])
    assert f"{len(peers) - LISTED} more" in notice.note
    assert len(notice.note) <= NOTE_LIMIT
    assert len(known["d"]) == len(peers)


def test_a_path_recovers_when_it_was_well_for_a_while() -> None:
    known, _ = news({}, READER, PEERS, {"d": [path("p0", slow=True)]})
    for _ in range(3):
        # Up and down around the limit is no news.
        for slow in [False] * (WELL - 1) + [True]:
            known, notices = news(known, READER, PEERS, {"d": [path("p0", slow=slow)]})
            assert notices == []
    for _ in range(WELL):
        known, notices = news(known, READER, PEERS, {"d": [path("p0", slow=False)]})
    assert [(n.type, n.reason) for n in notices] == [("Normal", "TransferRecovered")]
    assert known == {}


@pytest.mark.parametrize(
    ("readers", "peers"),
    [
        pytest.param({}, PEERS, id="the decode pod"),
        pytest.param({"other": Reader("chat-decode-0", "b")}, PEERS, id="the decode pod, and it has a successor"),
        pytest.param(READER, frozenset({"p1"}), id="the prefill pod"),
    ],
)
def test_what_is_gone_is_forgotten_and_has_not_recovered(readers: dict[str, Reader], peers: frozenset[str]) -> None:
    known, _ = news({}, READER, PEERS, {"d": [path("p0", slow=True)]})
    assert news(known, readers, peers, {uid: [path("p0", slow=False)] for uid in readers}) == ({}, [])


def test_what_a_pod_says_of_pods_that_are_not_there_is_not_repeated() -> None:
    assert news({}, READER, PEERS, {"d": [path("of somebody else", slow=True)]}) == ({}, [])


ANSWER = st.none() | st.dictionaries(st.sampled_from(sorted(PEERS)), st.booleans())


@given(st.lists(ANSWER, max_size=60))
def test_each_path_is_told_slow_and_recovered_in_turn(answers: list[dict[str, bool] | None]) -> None:
    """Against what is true of one path alone, whatever others do, and whatever answers are missing."""
    known: Known = {}
    is_told, well = dict.fromkeys(PEERS, False), dict.fromkeys(PEERS, 0)
    for answer in answers:
        said = {} if answer is None else {"d": [path(peer, slow=slow) for peer, slow in answer.items()]}
        known, notices = news(known, READER, PEERS, said)
        slow_now, well_now = set(), set()
        for peer, slow in (answer or {}).items():
            well[peer] = 0 if slow else well[peer] + 1
            if slow and not is_told[peer]:
                slow_now.add(peer)
            elif is_told[peer] and well[peer] == WELL:
                well_now.add(peer)
            is_told[peer] = (is_told[peer] or slow) and peer not in well_now
        notes = {notice.reason: notice.note for notice in notices}
        assert {peer for peer in PEERS if peer in notes.get("TransferSlow", "")} == slow_now
        assert {peer for peer in PEERS if peer in notes.get("TransferRecovered", "")} == well_now
        assert set(known.get("d", {})) == {peer for peer in PEERS if is_told[peer]}


def test_only_ready_leaders_are_asked() -> None:
    made = target(decode={"replicas": 3, "hostsPerReplica": 2})
    members = [pod(f"chat-decode-{n}", ready=n != 2, leaving=n == 4, podIP=f"10.0.0.{n}") for n in range(6)]
    readers, peers = ends(made, {"decode": members, "prefill": [pod("chat-prefill-0", role="prefill")]})
    assert readers == {
        "uid-chat-decode-0": Reader("chat-decode-0", "10.0.0.0"),
        "uid-chat-decode-2": Reader("chat-decode-2", None),
    }
    assert peers == {"chat-prefill-0"}


def test_a_pods_own_words_are_understood() -> None:
    rates = Rates()
    for peer, seconds in (("p0", 0.2), ("p1", 100.0)):
        rates.begin(peer, 0)
        rates.end(peer, 10**9, seconds)
    body = ready_probe(State().ready()).body
    assert read(body) == []
    assert read(body | {"kv_paths": rates.card()}) == [Path("p0", 5e9, 0, False), Path("p1", 1e7, 5e9, True)]


GOOD = {"peer": "p0", "bytes_per_second": 1, "best": 2.5, "slow": True}


@pytest.mark.parametrize(
    "body",
    [None, [], {}, {"stage": "Draining", "kv_paths": [GOOD]}, {"stage": "Ready", "kv_paths": GOOD},
     *({"stage": "Ready", "kv_paths": [GOOD, {**GOOD, **wrong}]}
       for wrong in ({"peer": 1}, {"slow": 1}, {"best": "2"}, {"best": -1}, {"bytes_per_second": float("nan")},
                     {"bytes_per_second": True})),
     {"stage": "Ready", "kv_paths": [GOOD, "p1"]}],
)  # fmt: skip
def test_anything_else_says_nothing(body: Any) -> None:
    assert read(body) is None


class Told(Pods[Sequence[Path]]):
    """And what was told of their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Any, list[str]]] = []

    async def tell(self, key: Any, notices: list[Notice]) -> None:
        self.told.append((key, told(notices)))


@pytest_asyncio.fixture
async def made(clock: FakeClock) -> AsyncIterator[tuple[Paths, Told]]:
    pods = Told()
    paths = Paths(clock, pods.ask, pods.tell)
    yield paths, pods
    await paths.close()


async def minute(clock: FakeClock, pods: Told, asked: int) -> None:
    """The next one, in which so many have been asked altogether."""
    clock.advance(ASK_SECONDS)
    await until(lambda: len(pods.asked) == asked and not pods.under_way)
    await come_of_it()


async def come_of_it() -> None:
    """Until what the answers bring has been done: nothing there waits for anything."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_pod_is_asked_once_a_minute_and_news_are_told(made: Any, clock: FakeClock) -> None:
    paths, pods = made
    paths.follow(KEY, READER, PEERS)
    await asyncio.sleep(0)
    assert pods.asked == []
    for asked, (says, news_told) in enumerate(
        [([path("p0", slow=True)], 1), ([path("p0", slow=True)], 1), (None, 1), ([path("p1", slow=True)], 2)], 1
    ):
        pods.says["a"] = says
        await minute(clock, pods, asked)
        assert len(pods.told) == news_told
    assert pods.told == [(KEY, ["TransferSlow"])] * 2


async def test_who_is_not_ready_is_not_asked_and_who_left_is_forgotten(made: Any, clock: FakeClock) -> None:
    paths, pods = made
    pods.says["a"] = [path("p0", slow=True)]
    paths.follow(KEY, READER, PEERS)
    await asyncio.sleep(0)
    await minute(clock, pods, 1)
    paths.follow(KEY, {"d": Reader("chat-decode-0", None)}, PEERS)
    await minute(clock, pods, 1)
    paths.follow(KEY, READER, PEERS)
    await minute(clock, pods, 2)
    assert len(pods.told) == 1, "it was away for a minute, and is the same pod"
    paths.follow(KEY, {}, PEERS)
    await minute(clock, pods, 2)
    paths.follow(KEY, READER, PEERS)
    await asyncio.sleep(0)
    await minute(clock, pods, 3)
    assert len(pods.told) == 2


async def test_many_are_not_asked_all_at_once(made: Any, clock: FakeClock) -> None:
    paths, pods = made
    for number in range(20):
        paths.follow(("ns", f"d{number}"), {f"u{n}": Reader(f"p{n}", f"{number}.{n}") for n in range(20)}, PEERS)
    await asyncio.sleep(0)
    clock.advance(ASK_SECONDS / 2)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert 0 < len(pods.asked) < 400, "deployments have their places in the minute"
    clock.advance(ASK_SECONDS / 2)
    await until(lambda: len(pods.asked) >= 400)
    assert pods.most <= AT_ONCE


async def test_a_round_that_breaks_is_not_the_last(made: Any, clock: FakeClock, monkeypatch: Any) -> None:
    paths, pods = made
    paths.follow(KEY, READER, PEERS)
    await asyncio.sleep(0)
    ask, paths.ask = paths.ask, None
    clock.advance(ASK_SECONDS)
    await come_of_it()
    paths.ask = ask
    await minute(clock, pods, 1)


class StandIn:
    """A decode pod's readiness endpoint, by HTTP."""

    def __init__(self) -> None:
        self.answered = 0
        """Answers that the operator has read."""
        self.paths: list[dict[str, Any]] = []

    async def readyz(self, request: web.Request) -> web.Response:
        return web.json_response(ready_probe(State().ready()).body | {"kv_paths": self.paths})


@pytest_asyncio.fixture
async def stand_in(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StandIn]:
    pod = StandIn()
    app = web.Application()
    app.router.add_get("/readyz", pod.readyz)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(listen, "API_PORT", runner.addresses[0][1])
    yield pod
    await runner.cleanup()


@pytest_asyncio.fixture
async def world(clock: FakeClock, stand_in: StandIn) -> AsyncIterator[World]:
    """One whose operator asks pods, each `start` with nothing known."""
    world = new_world(clock)
    async with aiohttp.ClientSession() as session:
        own, ask = world.start, over_http(session, read)

        async def counted(address: str) -> Sequence[Path] | None:
            answer = await ask(address)
            stand_in.answered += 1
            return answer

        async def tell(key: Any, notices: list[Notice]) -> None:
            resource = world.store.get(DEPLOYMENT_RESOURCE, *key)
            assert resource is not None
            await world.reconciler.recorder.record(resource, notices)

        begun: list[Paths] = []

        def start() -> None:
            own()
            for ended in begun:
                ended.follow(KEY, {}, ())
            begun.append(Paths(clock, counted, tell))
            world.reconciler.follow_paths = begun[-1].follow

        world.start = start  # type: ignore[method-assign]
        world.start()
        yield world
        for paths in begun:
            await paths.close()


async def asked(world: World, stand_in: StandIn) -> None:
    await asyncio.sleep(0)
    before = stand_in.answered
    world.clock.advance(ASK_SECONDS)
    await until(lambda: stand_in.answered == before + 1)
    await come_of_it()


async def test_a_slow_path_is_an_event_of_the_deployment_and_nothing_else(world: World, stand_in: StandIn) -> None:
    await world.run()
    world.serve()
    decode = world.api.find("Pod", "chat-decode-0")
    decode["status"]["podIP"] = "127.0.0.1"
    world.api.put(POD, decode)
    await world.run()
    await world.run()
    world.api.calls.clear()
    slow = {"peer": "chat-prefill-0", "bytes_per_second": 45_000_000, "best": 0, "slow": True}

    def events(reason: str) -> list[str]:
        return [event["note"] for event in world.api.told if event["reason"] == reason]

    await asked(world, stand_in)
    assert world.api.calls == []
    stand_in.paths = [slow]
    for _ in range(3):
        await asked(world, stand_in)
    assert [verb for verb, *_ in world.api.calls] == ["patch"]
    (note,) = events("TransferSlow")
    assert note.startswith("chat-decode-0 reads KV slowly from chat-prefill-0 at 45 MB/s")
    # Another process tells it once more, at most.
    world.start()
    await world.run()
    for _ in range(2):
        await asked(world, stand_in)
    assert len(events("TransferSlow")) <= 2
    stand_in.paths = [{**slow, "slow": False}]
    for _ in range(WELL + 2):
        await asked(world, stand_in)
    assert events("TransferRecovered") == ["chat-decode-0 reads KV from chat-prefill-0 as fast as it should again."]
    # With the deployment the asking ends.
    del world.api.objects[DEPLOYMENT_RESOURCE, *KEY]
    await world.run()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("paths ") and not task.cancelling()]
