"""EndpointSlices (discovery.k8s.io/v1, as JSON) → addresses of pods that take new requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from glm52_engine.config import API_PORT, host_index

PORT_NAME = "http"


def ready_urls(slices: Iterable[Mapping[str, Any]], hosts: int = 1) -> frozenset[str]:
    """URLs of every ready endpoint of a Service's slices. A terminating pod is not ready, whatever its probe says.

    Of a replica of several `hosts` only the leader takes requests. A Service cannot select it: a selector knows no
    remainders, and a label of its own would come late to a pod that the router then does not find.
    """
    return frozenset(
        _url(str(endpoint["addresses"][0]), _port(piece))
        for piece in slices
        for endpoint in piece.get("endpoints") or []
        if endpoint.get("addresses")
        and _takes_requests(endpoint.get("conditions") or {})
        and (hosts == 1 or host_index(str((endpoint.get("targetRef") or {}).get("name")), hosts) == 0)
    )


def _takes_requests(conditions: Mapping[str, Any]) -> bool:
    # The API says: an absent `ready` is to be read as true, an absent `terminating` as false.
    return conditions.get("ready") is not False and conditions.get("terminating") is not True


def _port(piece: Mapping[str, Any]) -> int:
    ports = piece.get("ports") or []
    named = [port for port in ports if port.get("name") == PORT_NAME] or ports
    return int(named[0].get("port") or API_PORT) if named else API_PORT


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


class SliceStore:
    """The slices of one Service, kept up to date by list and watch events."""

    def __init__(self, hosts: int = 1) -> None:
        self._hosts = hosts
        self._slices: dict[str, Mapping[str, Any]] = {}
        self.version = ""

    def replace(self, listing: Mapping[str, Any]) -> None:
        self._slices = {item["metadata"]["name"]: item for item in listing.get("items") or []}
        self.version = str((listing.get("metadata") or {}).get("resourceVersion") or "")

    def apply(self, event: Mapping[str, Any]) -> bool:
        """False: the event is an error (410 and the like), a new list is needed."""
        kind, item = event.get("type"), event.get("object") or {}
        metadata = item.get("metadata") or {}
        if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
            return False
        self.version = str(metadata.get("resourceVersion") or self.version)
        if kind == "DELETED":
            self._slices.pop(str(metadata.get("name")), None)
        elif kind != "BOOKMARK":
            self._slices[metadata["name"]] = item
        return True

    def urls(self) -> frozenset[str]:
        return ready_urls(self._slices.values(), self._hosts)
