"""Addresses that collide with nothing, and a clean-up that takes ours and leaves everything else."""

from __future__ import annotations

import pytest

from e2e.cluster import network
from e2e.cluster.errors import Refused
from e2e.cluster.network import Addresses, Before, choose, cleanup, routed

ROUTES = """default via 192.168.1.1 dev eth0
192.168.1.0/24 dev eth0 proto kernel scope link src 192.168.1.7
unreachable 10.250.0.0/15
local 127.0.0.0/8 dev lo table local proto kernel scope host src 127.0.0.1
10.42.0.7 dev cali1 scope link
"""


def test_a_block_is_cut_without_overlap() -> None:
    addresses = Addresses("10.248.0.0/14")
    assert addresses.docker_bip == "10.248.0.1/24"
    assert (addresses.nodes, addresses.gateway) == ("10.249.0.0/24", "10.249.0.1")
    assert (addresses.pods, addresses.services) == ("10.250.0.0/16", "10.251.0.0/16")
    assert (addresses.api_service, addresses.cluster_only) == ("10.251.0.1", "10.250.0.0/15")


def test_routes_are_read_less_the_default() -> None:
    assert routed(ROUTES) == ["192.168.1.0/24", "10.250.0.0/15", "127.0.0.0/8", "10.42.0.7"]


def test_the_first_free_block_is_taken() -> None:
    assert choose([]).block == network.CANDIDATES[0]
    assert choose(["10.249.3.0/24"]).block == network.CANDIDATES[1]
    assert choose(["10.248.0.0/14", "10.228.0.1"]).block == network.CANDIDATES[2]


def test_no_free_block_is_refused() -> None:
    with pytest.raises(Refused, match="free one"):
        choose(["10.0.0.0/8"])


FOREIGN = """-P INPUT ACCEPT
-P FORWARD ACCEPT
-N MYRULES
-A FORWARD -i wg0 -j ACCEPT
-A FORWARD -s 10.0.0.0/8 -j MYRULES"""
OURS = """-P INPUT ACCEPT
-P FORWARD DROP
-N DOCKER
-N DOCKER-USER
-N MYRULES
-A FORWARD -j DOCKER-USER
-A FORWARD -o glm52-nodes0 -j DOCKER
-A FORWARD -i wg0 -j ACCEPT
-A FORWARD -s 10.0.0.0/8 -j MYRULES
-A FORWARD -i tun0 -j ACCEPT
-A DOCKER -d 10.249.0.2/32 -p tcp -j ACCEPT
-A DOCKER-USER -i glm52-nodes0 ! -o glm52-nodes0 -j REJECT
-A DOCKER-USER -j RETURN"""


def plan(before: str, now: str, private: bool = True) -> list[str]:
    commands = cleanup(Before("10.248.0.0/14", {"filter": before}, "0"), {"filter": now}, private)
    return [" ".join(command).removeprefix("iptables --wait -t filter ") for command in commands]


def test_cleanup_takes_rules_chains_and_policy_of_the_private_daemon() -> None:
    commands = plan(FOREIGN, OURS)
    assert "-D FORWARD -j DOCKER-USER" in commands
    assert "-D DOCKER -d 10.249.0.2/32 -p tcp -j ACCEPT" in commands
    assert commands[-5:] == ["-F DOCKER", "-F DOCKER-USER", "-X DOCKER", "-X DOCKER-USER", "-P FORWARD ACCEPT"]


def test_cleanup_leaves_what_others_added_since() -> None:
    assert not any("tun0" in each or "wg0" in each or "MYRULES" in each for each in plan(FOREIGN, OURS))


def test_cleanup_leaves_the_chains_of_a_docker_that_was_there_before() -> None:
    before = FOREIGN + "\n-N DOCKER\n-N DOCKER-USER\n-A FORWARD -j DOCKER-USER\n-A DOCKER-USER -j RETURN"
    commands = plan(before, OURS)
    assert not any(each.startswith(("-F", "-X")) for each in commands)
    assert "-D FORWARD -j DOCKER-USER" not in commands
    assert "-D DOCKER-USER -i glm52-nodes0 ! -o glm52-nodes0 -j REJECT" in commands


def test_in_the_users_own_daemon_only_rules_on_our_bridge_go() -> None:
    commands = plan(FOREIGN, OURS, private=False)
    assert commands
    assert all("glm52-nodes0" in each for each in commands)


def test_nothing_is_left_to_do_the_second_time() -> None:
    assert plan(FOREIGN, FOREIGN) == []


def test_interfaces_are_named_without_their_peer() -> None:
    text = "7: veth1@if2: <BROADCAST,UP> mtu 1500 master glm52-nodes0\n9: eth9: <UP> mtu 1500\n"
    assert network.interfaces(text) == ["veth1", "eth9"]


def test_bridge_names_fit_the_kernel() -> None:
    assert all(len(name) <= 15 for name in (network.DOCKER_BRIDGE, network.NODE_BRIDGE))
