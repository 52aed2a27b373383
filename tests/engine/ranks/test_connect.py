"""Leader and rank hosts find each other over real sockets: all at once, all or none, and again after a failure."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from glm52_engine.lifecycle.start import InternalToken, bind
from glm52_engine.ranks import connect, handshake, link
from glm52_engine.ranks.connect import ConnectError, connect_hosts
from glm52_engine.ranks.frames import MARK, frame
from glm52_engine.ranks.handshake import challenge, hello
from glm52_engine.ranks.link import Link, LinkLost
from glm52_engine.ranks.messages import Accepted, Beat, Joined, PhaseOver, Refused, Terms, encode
from glm52_engine.ranks.reception import Reception
from glm52_engine.ranks.spans import RankHost, RankSpan

SECRET = "of this deployment"
TOKEN = InternalToken((SECRET,))
SECONDS = 20.0
TERMS = Terms(
    "f" * 64, (2, 1, 3), block_size=16, block_bytes=4096, blocks=64, seats=8, max_model_len=512, step_tokens=64
)


@dataclass
class Host:
    """A rank host's door without anything behind it."""

    reception: Reception
    address: RankHost


@asynccontextmanager
async def listening(
    first: int, count: int, terms: Terms | None = TERMS, token: InternalToken = TOKEN
) -> AsyncIterator[Host]:
    listener = bind("127.0.0.1", 0)
    address = RankHost("127.0.0.1", listener.getsockname()[1], count)
    reception = Reception(RankSpan(address.name, first, count), token)
    if terms is not None:
        reception.terms.set_result(terms)
    await reception.open(listener)
    try:
        yield Host(reception, address)
    finally:
        await reception.close()


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Host, Host]]:
    """Ranks 2, and 3 to 5, of a replica whose leader has 0 and 1."""
    async with listening(2, 1) as one, listening(3, 3) as two:
        yield one, two


async def dial(
    *hosts: Host | RankHost, terms: Terms = TERMS, secret: str = SECRET, seconds: float = SECONDS
) -> list[Link]:
    addresses = [host.address if isinstance(host, Host) else host for host in hosts]
    return [remote.link for remote in await connect_hosts(2, addresses, terms, secret, seconds=seconds)]


async def closed(end: Link) -> bool:
    """Whether the peer has ended the connection, within the time in which silence would be noticed."""
    with pytest.raises(LinkLost) as lost:
        await end.receive()
    return "silent" not in str(lost.value)


async def test_no_remote_host_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "open_connection", None)
    assert await connect_hosts(4, [], TERMS, SECRET, seconds=0) == []


async def test_both_ends_talk_after_the_handshake(pair: tuple[Host, Host]) -> None:
    links = await dial(*pair)
    for host, ours in zip(pair, links, strict=True):
        theirs = await host.reception.leader()
        await theirs.send(Joined())
        assert await ours.receive() == Joined()
        await ours.send(PhaseOver("x", 0.0, 1.0))
        assert await theirs.receive() == PhaseOver("x", 0.0, 1.0)
        await ours.close()


async def test_the_order_is_the_given_one_whoever_answers_first() -> None:
    async with listening(2, 1, terms=None) as slow, listening(3, 3) as quick:
        task = asyncio.create_task(connect_hosts(2, [slow.address, quick.address], TERMS, SECRET, seconds=SECONDS))
        await quick.reception.leader()
        slow.reception.terms.set_result(TERMS)
        remotes = await task
        assert [remote.span.first_rank for remote in remotes] == [2, 3]
        assert [remote.link.peer for remote in remotes] == [slow.address.name, quick.address.name]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"fingerprint": "e" * 64}, "fingerprint: this host has"),
        ({"hosts": (2, 1, 4)}, "hosts: this host has (2, 1, 3), the leader (2, 1, 4)"),
        ({"block_size": 32}, "block_size: this host has 16, the leader 32"),
        ({"seats": 9}, "seats"),
    ],
)
async def test_a_host_of_another_replica_is_refused_by_the_field(
    pair: tuple[Host, Host], changed: dict[str, object], named: str
) -> None:
    with pytest.raises(ConnectError) as failed:
        await dial(*pair, terms=replace(TERMS, **changed))  # type: ignore[arg-type]
    assert named in str(failed.value)
    assert failed.value.final
    for host in pair:
        assert host.address.name in str(failed.value)
    await dial(*pair)  # both hosts are ready for the next leader


async def test_a_host_that_was_started_for_other_ranks_is_refused() -> None:
    async with listening(3, 1) as host:
        with pytest.raises(ConnectError, match="the leader gives this host rank 2, it was started for rank 3"):
            await dial(host)


async def test_a_leader_of_another_version_is_refused(pair: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "hello", lambda *args: replace(hello(*args), version=0))
    with pytest.raises(ConnectError, match="speaks version 0 of the rank protocol, this host version 3"):
        await dial(*pair)


def test_a_host_of_another_version_is_left_alone() -> None:
    with pytest.raises(handshake.HandshakeError, match="version 9"):
        hello(replace(challenge(), version=9), TERMS, RankSpan("a", 0, 1), SECRET)


async def test_who_does_not_know_the_secret_learns_nothing_else(pair: tuple[Host, Host]) -> None:
    pair[0].reception.refuse("the disk is broken")
    with pytest.raises(ConnectError) as failed:
        await dial(*pair, secret="guessed", terms=replace(TERMS, fingerprint="0" * 64))
    assert str(failed.value).count("the shared secret differs") == 2
    assert TERMS.fingerprint not in str(failed.value)
    assert "disk" not in str(failed.value)


async def test_while_the_secret_changes_a_host_takes_the_old_and_the_new_one() -> None:
    async with listening(2, 1, token=InternalToken(("new", "old"))) as host:
        for secret in ("old", "new"):
            (end,) = await dial(host, secret=secret)
            await end.close()
            assert await closed(await host.reception.leader())
            await host.reception.part()


async def test_a_recorded_hello_opens_nothing(pair: tuple[Host, Host]) -> None:
    recorded = hello(challenge(), TERMS, RankSpan("", 2, 1), SECRET)
    reader, writer = await asyncio.open_connection("127.0.0.1", pair[0].address.port)
    end = Link("host", reader, writer)
    await end.said_within(SECONDS)
    await end.send(recorded)
    assert "secret differs" in str(await end.said_within(SECONDS))
    await end.close()


async def test_a_host_that_cannot_prove_itself_is_no_host() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = Link("leader", reader, writer)
        await end.send(challenge())
        await end.said_within(SECONDS)
        await end.send(Accepted("0" * 64))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = RankHost("127.0.0.1", server.sockets[0].getsockname()[1], 1)
        with pytest.raises(ConnectError, match="without knowing the shared secret"):
            await dial(address)


async def test_one_failure_closes_those_that_had_succeeded(
    pair: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(6, 1, terms=replace(TERMS, fingerprint="0" * 64)) as wrong:
        with pytest.raises(ConnectError) as failed:
            await dial(*pair, wrong)
    assert [span.host for span, _ in failed.value.reasons] == [wrong.address.name]
    assert "rank 6" in str(failed.value)
    for host in pair:
        assert await closed(await host.reception.leader())
        await host.reception.part()
    await dial(*pair)


async def test_a_host_that_is_away_is_tried_until_the_time_is_over_and_named(pair: tuple[Host, Host]) -> None:
    gone = bind("127.0.0.1", 0)
    address = RankHost("127.0.0.1", gone.getsockname()[1], 1)
    gone.close()
    with pytest.raises(ConnectError) as failed:
        await dial(pair[0], address, seconds=1.2)
    assert not failed.value.final
    assert f"rank host {address.name} (rank 3)" in str(failed.value)
    assert "refused" in str(failed.value)
    assert "tried" in str(failed.value)
    assert await closed(await pair[0].reception.leader())


async def test_a_refusal_for_good_ends_the_wait_for_those_that_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "LAST_TRY_SECONDS", 0.1)
    gone = bind("127.0.0.1", 0)
    address = RankHost("127.0.0.1", gone.getsockname()[1], 1)
    gone.close()
    async with listening(3, 1, terms=replace(TERMS, seats=1)) as wrong:
        with pytest.raises(ConnectError) as failed:
            await dial(address, wrong, seconds=3600)
    assert len(failed.value.reasons) == 2
    assert failed.value.final


async def test_a_host_that_comes_late_is_found() -> None:
    held = bind("127.0.0.1", 0)
    address = RankHost("127.0.0.1", held.getsockname()[1], 1)
    task = asyncio.create_task(dial(address))
    reception = Reception(RankSpan(address.name, 2, 1), TOKEN)
    reception.terms.set_result(TERMS)
    await reception.open(held)
    assert len(await task) == 1
    await reception.close()


async def test_a_leader_that_restarts_is_let_in_when_the_old_one_is_gone(pair: tuple[Host, Host]) -> None:
    old = await dial(*pair)
    task = asyncio.create_task(dial(*pair))
    for host in pair:
        await host.reception.leader()
    assert not task.done()
    for end, host in zip(old, pair, strict=True):
        await end.close()
        assert await closed(await host.reception.leader())
        await host.reception.part()
    assert len(await task) == 2


async def test_a_host_that_cannot_start_says_why(pair: tuple[Host, Host]) -> None:
    pair[1].reception.refuse("model.safetensors: is missing")
    with pytest.raises(ConnectError, match=r"ranks 3 to 5.*model.safetensors: is missing"):
        await dial(*pair)


async def test_a_host_that_fails_while_a_leader_waits_says_why_at_once() -> None:
    async with listening(2, 1, terms=None) as host:
        task = asyncio.create_task(dial(host))
        await asyncio.sleep(0)
        host.reception.refuse("config.json: is missing")
        with pytest.raises(ConnectError, match=r"config\.json: is missing"):
            # Long before the host would give up waiting for what it was to compare.
            await asyncio.wait_for(task, handshake.HANDSHAKE_SECONDS / 2 - 1)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MARK + b"\xff\xff\xff\xff",
        MARK + b"\x00\x00\x00\x05{}",
        frame(b"{}"),
        frame(encode(Beat())),
        frame(encode(Refused("no"))),
        b"\x00",
        b"",
    ],
)
async def test_after_any_noise_the_host_is_ready_for_the_next_leader(pair: tuple[Host, Host], noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", pair[0].address.port)) as stranger:
        stranger.sendall(noise)
        stranger.shutdown(socket.SHUT_WR)
        await asyncio.to_thread(_read_all, stranger)  # it ends: the connection was dropped
    assert len(await dial(*pair)) == 2


async def test_a_peer_that_stays_silent_does_not_keep_the_leader_out(pair: tuple[Host, Host]) -> None:
    with socket.create_connection(("127.0.0.1", pair[0].address.port)):
        assert len(await dial(*pair)) == 2


async def test_something_else_that_listens_there_is_told_apart() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = RankHost("127.0.0.1", server.sockets[0].getsockname()[1], 1)
        with pytest.raises(ConnectError, match="another protocol"):
            await dial(address)


async def test_a_silent_peer_is_lost(pair: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    links = await dial(*pair)
    theirs = await pair[0].reception.leader()
    monkeypatch.setattr(link, "SILENCE_SECONDS", 0.3)
    assert theirs._beats is not None
    theirs._beats.cancel()
    with pytest.raises(LinkLost, match="silent"):
        await links[0].receive()


async def test_giving_up_closes_every_link(pair: tuple[Host, Host]) -> None:
    async with listening(6, 1, terms=None) as waits:
        task = asyncio.create_task(dial(*pair, waits))
        ends = [await host.reception.leader() for host in pair]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for end in ends:
            assert await closed(end)


def _read_all(end: socket.socket) -> None:
    end.settimeout(SECONDS)
    while end.recv(4096):
        pass
