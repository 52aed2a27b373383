"""A small asynchronous client: plain dicts, no rate limit, and watches that go on until they are told otherwise."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

Object = dict[str, Any]
Query = dict[str, str]

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"

_LINE_LIMIT = 1 << 24
"""Bytes of the largest watch event."""

RESOURCES: dict[str, tuple[str, str]] = {
    "Namespace": ("v1", "namespaces"),
    "Node": ("v1", "nodes"),
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "ConfigMap": ("v1", "configmaps"),
    "Secret": ("v1", "secrets"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "ResourceQuota": ("v1", "resourcequotas"),
    "StatefulSet": ("apps/v1", "statefulsets"),
    "Deployment": ("apps/v1", "deployments"),
    "ReplicaSet": ("apps/v1", "replicasets"),
    "ControllerRevision": ("apps/v1", "controllerrevisions"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "EndpointSlice": ("discovery.k8s.io/v1", "endpointslices"),
    "Event": ("events.k8s.io/v1", "events"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "Role": ("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
    "ClusterRole": ("rbac.authorization.k8s.io/v1", "clusterroles"),
    "ClusterRoleBinding": ("rbac.authorization.k8s.io/v1", "clusterrolebindings"),
    "APIService": ("apiregistration.k8s.io/v1", "apiservices"),
    "HorizontalPodAutoscaler": ("autoscaling/v2", "horizontalpodautoscalers"),
    "CustomResourceDefinition": ("apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "GLM52Deployment": ("glm52.dev/v1alpha1", "glm52deployments"),
}


class Refused(AssertionError):
    """The API server said no; `code` is the HTTP status, the text its own words."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def path(kind: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
    version, plural = RESOURCES[kind]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    parts = [root, *(("namespaces", namespace) if namespace else ()), plural]
    return "/".join([*parts, *(part for part in (name, subresource) if part)])


class Client:
    """One user's requests; made and used within one event loop."""

    def __init__(self, server: str, ca: Path, token: str, agent: str) -> None:
        self._server = server
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(ca)), limit=0),
            headers={"Authorization": f"Bearer {token}", "User-Agent": agent},
            timeout=aiohttp.ClientTimeout(total=60),
            read_bufsize=_LINE_LIMIT,
        )

    async def close(self) -> None:
        await self._session.close()

    async def request(
        self,
        method: str,
        where: str,
        body: Object | None = None,
        query: Query | None = None,
        *,
        content_type: str = "application/json",
        user: str = "",
    ) -> Object:
        """`user`: who asks, in place of the client's own."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type} | ({"Impersonate-User": user} if user else {})
        async with self._session.request(
            method, self._server + where, data=data, headers=headers, params=query or {}
        ) as answer:
            text = await answer.text()
        if answer.status >= 400:
            raise Refused(answer.status, _message(text))
        found: Object = json.loads(text)
        return found

    async def apply(self, obj: Object, manager: str = "test", **query: str) -> Object:
        meta = obj["metadata"]
        where = path(obj["kind"], meta.get("namespace"), meta["name"])
        asked = {"fieldManager": manager, "fieldValidation": "Strict", **query}
        return await self.request("PATCH", where, obj, asked, content_type=APPLY)

    async def watch(self, kind: str) -> AsyncIterator[tuple[str, Object]]:
        """Every change of a kind, for ever: ("LISTED", the list) first and after each gap, then (type, object)."""
        while True:
            try:
                listed = await self.request("GET", path(kind))
                yield "LISTED", listed
                async for event in self._stream(kind, listed["metadata"]["resourceVersion"]):
                    yield event
            except (aiohttp.ClientError, TimeoutError, OSError, Refused):
                await asyncio.sleep(0.1)

    async def _stream(self, kind: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        asked = {"watch": "true", "resourceVersion": version}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        async with self._session.get(self._server + path(kind), params=asked, timeout=timeout) as answer:
            if answer.status >= 400:
                raise Refused(answer.status, await answer.text())
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
