"""Addresses nobody else uses, a firewall that lets nothing out, and the plan that takes both away again."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.cluster.errors import Failed, Refused
from e2e.cluster.paths import write_atomically
from e2e.cluster.shell import ok, run

DOCKER_BRIDGE, NODE_BRIDGE = "glm52-docker0", "glm52-nodes0"
NETWORK = "glm52"
TABLES = ("filter", "nat", "mangle", "raw")
# /14 blocks off the beaten track: 10.244 is kind's own, 10.42 and 10.43 k3s', 10.96 kubeadm's.
CANDIDATES = tuple(f"10.{second}.0.0/14" for second in (248, 228, 212, 196, 180, 164, 148, 132))


@dataclass(frozen=True)
class Addresses:
    """One /14 cut into four: Docker's own bridge, the nodes, the pods, the services."""

    block: str

    def _quarter(self, index: int) -> ipaddress.IPv4Network:
        return list(ipaddress.ip_network(self.block).subnets(new_prefix=16))[index]  # type: ignore[return-value]

    @property
    def docker_gateway(self) -> str:
        return str(self._quarter(0)[1])

    @property
    def docker_bip(self) -> str:
        return f"{self.docker_gateway}/24"

    @property
    def nodes(self) -> str:
        return f"{self._quarter(1)[0]}/24"

    @property
    def gateway(self) -> str:
        return str(self._quarter(1)[1])

    @property
    def pods(self) -> str:
        return str(self._quarter(2))

    @property
    def services(self) -> str:
        return str(self._quarter(3))

    @property
    def api_service(self) -> str:
        return str(self._quarter(3)[1])

    @property
    def cluster_only(self) -> str:
        """Pods and services: addresses that must never be looked for on the default route."""
        return str(list(ipaddress.ip_network(self.block).subnets(new_prefix=15))[1])


def choose(taken: Sequence[str]) -> Addresses:
    """The first block that overlaps no route of this machine."""
    networks = [ipaddress.ip_network(each, strict=False) for each in taken]
    for block in CANDIDATES:
        if not any(ipaddress.ip_network(block).overlaps(each) for each in networks):
            return Addresses(block)
    raise Refused(f"This machine routes all of {', '.join(CANDIDATES)}: free one of these blocks for the cluster.")


def routed(ip_route: str) -> list[str]:
    """The IPv4 networks in the output of `ip -4 route show table all`, less the default route."""
    found = []
    for line in ip_route.splitlines():
        words = [
            word for word in line.split() if word not in ("unreachable", "local", "broadcast", "blackhole", "prohibit")
        ]
        if words and re.fullmatch(r"[0-9.]+(/[0-9]+)?", words[0]) and not words[0].endswith("/0"):
            found.append(words[0])
    return found


@dataclass
class Before:
    """What the machine was like before the first `up`, for `down` to go back to."""

    block: str
    iptables: dict[str, str]
    ip_forward: str

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.block)


def remember(file: Path) -> Before:
    """What was before: read if it is on file, else looked up and put on file before anything is changed."""
    known = recall(file)
    if known is None:
        block = choose(routed(run(["ip", "-4", "route", "show", "table", "all"]))).block
        known = Before(block, tables(), Path("/proc/sys/net/ipv4/ip_forward").read_text().strip())
        write_atomically(file, json.dumps(asdict(known)))
    return known


def recall(file: Path) -> Before | None:
    try:
        return Before(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def tables() -> dict[str, str]:
    return {table: run(["iptables", "--wait", "-t", table, "-S"]) for table in TABLES}


def close(addresses: Addresses, bridges: Sequence[str]) -> None:
    """Let nothing from these bridges leave the machine, and no address of the cluster be looked for outside.

    Before kube-proxy has written its rules, packets for a service's address follow the default route.
    """
    for bridge in bridges:
        rule = ["DOCKER-USER", "-i", bridge, "!", "-o", bridge, "-j", "REJECT"]
        if not ok(["iptables", "--wait", "-C", *rule]):
            run(["iptables", "--wait", "-I", *rule])
    run(["ip", "route", "replace", "unreachable", addresses.cluster_only])


def open_again(before: Before, private: bool) -> None:
    """Undo everything that `close`, and with `private` the daemon's own start, did to this machine."""
    for command in cleanup(before, tables(), private):
        ok(command)  # each is wanted, none is needed: what is gone already is no error
    bridges = (DOCKER_BRIDGE, NODE_BRIDGE) if private else ()
    for bridge in bridges:
        ok(["ip", "link", "delete", bridge])
    ok(["ip", "route", "delete", "unreachable", before.addresses.cluster_only])
    if private and before.ip_forward == "0":
        Path("/proc/sys/net/ipv4/ip_forward").write_text("0\n")


def cut_cables() -> None:
    """Delete the virtual cables on our bridges.

    Those of a killed node stay, and once the bridge is gone no one can tell whose they are.
    """
    for bridge in (DOCKER_BRIDGE, NODE_BRIDGE):
        try:
            listed = run(["ip", "-oneline", "link", "show", "master", bridge])
        except Failed:
            continue  # no such bridge
        for cable in interfaces(listed):
            ok(["ip", "link", "delete", cable])


def interfaces(ip_link: str) -> list[str]:
    """Names out of `ip -oneline link`: "7: veth1@if2: <…" is veth1."""
    return [line.split(": ")[1].partition("@")[0] for line in ip_link.splitlines() if ": " in line]


def cleanup(before: Before, now: dict[str, str], private: bool) -> list[list[str]]:
    """The iptables commands that take out our rules and chains and nothing that was there before."""
    commands: list[list[str]] = []
    for table, text in now.items():
        old = set(before.iptables.get(table, "").splitlines())
        new = [line for line in text.splitlines() if line not in old]
        iptables = ["iptables", "--wait", "-t", table]
        commands += [
            [*iptables, "-D", *line.split()[1:]]
            for line in new
            if line.startswith("-A ") and _ours(line, before, private)
        ]
        chains = [line.split()[1] for line in new if line.startswith("-N DOCKER") and private]
        # All are emptied before the first goes: they jump to one another.
        commands += [[*iptables, "-F", chain] for chain in chains]
        commands += [[*iptables, "-X", chain] for chain in chains]
        commands += [
            [*iptables, "-P", *line.split()[1:]]
            for line in sorted(old)
            if private and line.startswith("-P ") and line not in text.splitlines()
        ]
    return commands


def _ours(rule: str, before: Before, private: bool) -> bool:
    if any(name in rule.split() for name in (DOCKER_BRIDGE, NODE_BRIDGE)):
        return True
    if not private:
        return False
    block = ipaddress.ip_network(before.block)
    inside = any(
        ipaddress.ip_network(found, strict=False).subnet_of(block)  # type: ignore[arg-type]
        for found in re.findall(r"\b\d+\.\d+\.\d+\.\d+(?:/\d+)?\b", rule)
        if ipaddress.ip_network(found, strict=False).version == 4
    )
    return inside or re.search(r"(-A|-j) DOCKER", rule) is not None
