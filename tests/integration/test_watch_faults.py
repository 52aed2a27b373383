"""Watches that break in every way a network knows; each is over within a minute."""

from __future__ import annotations

import signal

import pytest

from e2e.controlplane.operator import Installed, Process
from e2e.controlplane.plane import ControlPlane
from e2e.controlplane.proxy import Proxy
from e2e.controlplane.space import Space, deployment

RECOVERED_SECONDS = 60.0


@pytest.fixture
def proxied(space: Space, installed: Installed, proxy: Proxy) -> Process:
    """An operator behind the proxy, with a deployment that serves; nobody else goes that way."""
    operator = installed.start(server=proxy.url)
    space.apply(deployment("chat"))
    space.until_ready("chat")
    return operator


def follows(space: Space, replicas: int, timeout: float = RECOVERED_SECONDS) -> None:
    """An edit that only a watch of deployments brings, and a deletion that only one of Services brings."""
    space.edit("chat", decode={"replicas": replicas})
    space.delete("Service", "chat-decode")
    space.until(
        "the edit reached the StatefulSet and the Service is back",
        lambda: (
            (space.seen("StatefulSet", "chat-decode") or {})["spec"]["replicas"] == replicas
            and space.seen("Service", "chat-decode")
        ),
        timeout,
    )


def test_connections_that_break(space: Space, proxied: Process, proxy: Proxy) -> None:
    for replicas in (2, 3):
        proxy.cut()
        follows(space, replicas)
    assert proxied.running()


def test_connections_that_are_silent_for_ever(space: Space, proxied: Process, proxy: Proxy) -> None:
    """Nobody is told: the other side acknowledges everything and never says a word."""
    proxy.silence()
    follows(space, 2)
    assert proxied.running()


def test_an_api_server_that_cannot_be_reached_for_a_while(space: Space, proxied: Process, proxy: Proxy) -> None:
    """Shorter than the lease lasts: the process goes on."""
    proxy.refuse()
    space.edit("chat", decode={"replicas": 2})
    space.cluster.idle(5)
    proxy.accept()
    follows(space, 3)
    assert proxied.running()


def test_one_that_cannot_be_reached_for_longer_than_the_lease(space: Space, proxied: Process, proxy: Proxy) -> None:
    """The process ends, since it can no longer know that it is the only one, and its successor goes on."""
    proxy.refuse()
    assert proxied.wait_ended() == 1
    assert "was not renewed" in proxied.text()
    space.edit("chat", decode={"replicas": 2})
    proxied.start()
    proxied.until("it is alive and not ready", lambda: proxied.status("/readyz") == 503)
    proxy.accept()
    follows(space, 3)


def test_what_was_deleted_while_a_watch_lost_its_place_is_made_again(
    space: Space, installed: Installed, proxy: Proxy, plane: ControlPlane
) -> None:
    """410 Gone: the watch begins anew with a list, which does not show what is gone."""
    operator = installed.start(server=proxy.url, alone=True)
    space.apply(deployment("chat"))
    space.until_ready("chat")
    # The operator takes a list within ten seconds of its start for the first one.
    space.cluster.idle(10)
    proxy.refuse()
    space.delete("Service", "chat-decode")
    space.until("the Service is gone", lambda: space.seen("Service", "chat-decode") is None)
    # An API server that has just started knows nothing of older versions.
    plane.restart_apiserver()
    proxy.accept()
    space.until("the Service is back", lambda: space.seen("Service", "chat-decode"), RECOVERED_SECONDS)
    assert any("watch_restarts" in name and value for name, value in operator.metrics().items())


def test_what_was_deleted_between_the_first_list_and_the_watches_is_made_again(space: Space, operator: Process) -> None:
    space.apply(deployment("chat"))
    space.until_ready("chat")
    operator.kill()
    operator.start()
    # Written when everything is listed, and before the watches begin.
    operator.until("it has listed everything", lambda: operator.text().count("serving ") == 2)
    operator.signal(signal.SIGSTOP)
    space.delete("Service", "chat-decode")
    space.until("the Service is gone", lambda: space.seen("Service", "chat-decode") is None)
    operator.signal(signal.SIGCONT)
    space.until("the Service is back", lambda: space.seen("Service", "chat-decode"), RECOVERED_SECONDS)


def test_an_api_server_that_is_started_anew(space: Space, installed: Installed, plane: ControlPlane) -> None:
    operator = installed.start(alone=True)
    space.apply(deployment("chat"))
    space.until_ready("chat")
    plane.restart_apiserver()
    follows(space, 2)
    assert operator.running()
