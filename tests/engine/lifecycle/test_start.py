from __future__ import annotations

import socket
from pathlib import Path

import pytest

from glm52_engine.config import ConfigError
from glm52_engine.lifecycle.start import bind, read_token, take


def test_a_taken_port_is_one_sentence() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} .*another --port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["256.0.0.1", "no such host"])
def test_an_address_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(host, 0)


def test_connections_notice_that_their_peer_is_gone() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_an_inherited_socket_keeps_its_port() -> None:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with take(listener.detach()) as taken:
        assert taken.getsockname()[1] == port


def test_a_number_that_is_no_socket_is_refused() -> None:
    with pytest.raises(ConfigError, match="--listen-fd 99999"):
        take(99999)


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), ("", "is empty"), (" \n", "is empty")])
def test_a_missing_secret_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_token(str(file))


def test_of_several_tokens_the_first_is_sent_and_each_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("new\n\n  old \n")
    token = read_token(str(file))
    assert token.sent == "new"
    assert [token.accepts(given) for given in (b"new", b"old", b"", b"new\n", b"newold")] == [True, True, *[False] * 3]
