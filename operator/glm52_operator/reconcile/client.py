"""A thin layer over the official client: plain dicts in and out, and errors that say what was tried.

The generated models are left aside: they cannot hold the partial objects of a server-side apply, and they would drop
fields of a newer API server.
"""

from __future__ import annotations

import builtins
import json
import math
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from kubernetes.aio import client as k8s
from kubernetes.aio import config as k8s_config
from kubernetes.aio.client.exceptions import ApiException

from glm52_operator import names
from glm52_operator.desired.target import Object
from glm52_operator.reconcile.kinds import LEASE, REVIEW, Kind

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_READS = frozenset({"get", "list"})
_TIMEOUT = aiohttp.ClientTimeout(total=30)
PAGE = 100
"""Objects of one answer to a list: unpacked, a page is the most that the operator ever holds at once."""
_NO_OBJECTS_VERSION = "1"
"""The version of an empty store: no object ever has it."""
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
MANAGED_SELECTOR = f"{names.MANAGED_BY}={names.MANAGER}"


class ApiError(Exception):
    """A request that the API server refused, or that never reached it (code 0)."""

    def __init__(self, *, code: int, text: str, verb: str, kind: Kind, name: str) -> None:
        super().__init__(f"cannot {verb} {kind.kind} {name}: {text} (HTTP {code})" if code else f"{verb}: {text}")
        self.code = code
        self.text = text
        self.verb = verb
        self.kind = kind
        self.name = name

    @property
    def resource(self) -> str:
        """The way RBAC names it, with the subresource that stands behind the name."""
        subresource = self.name.partition("/")[2]
        return f"{self.kind.resource}/{subresource}" if subresource else self.kind.resource


class Api:
    """Requests of the operator; every write carries the same field manager."""

    def __init__(self, client: k8s.ApiClient, identity: str = "") -> None:
        self._client = client
        # The audit log tells one operator from another.
        client.user_agent = f"{names.MANAGER} ({identity})" if identity else names.MANAGER
        self.may_write: Callable[[], bool] = lambda: True
        """Asked right before every write but those of the lease: whether this process is still the one that acts."""
        self.on_answer: Callable[[str, Kind, int], None] = lambda verb, kind, code: None
        """Told of every request when it is over; code 0: it did not reach the API server."""
        self.on_written: Callable[[Kind, Object], None] = lambda kind, obj: None
        """Told of every object that the API server took."""

    @classmethod
    async def connect(cls, identity: str = "") -> Api:
        """Inside a pod by its service account, elsewhere by KUBECONFIG."""
        configuration = k8s.Configuration()
        # Else aiohttp asks a thread for the proxies of the environment before every request.
        configuration.client_session_kwargs = {"trust_env": bool(urllib.request.getproxies_environment())}
        try:
            k8s_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except k8s_config.ConfigException:
            await k8s_config.load_kube_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration, persist_config=False
            )
        return cls(k8s.ApiClient(configuration), identity)

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def reconnect(self) -> None:
        """Make all connections anew: one that brings no answer was cut silently, and those beside it were, too.

        Requests under way fail as if they had not reached the API server.
        """
        rest = self._client.rest_client
        old, rest.pool_manager = rest.pool_manager, None
        if old is not None:
            await old.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return await self._maybe("get", kind, namespace, name)

    async def get_metadata(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Only metadata crosses the wire: what a Secret holds is no business of the operator."""
        return await self._maybe("get", kind, namespace, name, accept=_METADATA_ONLY)

    async def list(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        labels: str | None = None,
        fields: str | None = None,
        keep: Callable[[Object], Any] | None = None,
    ) -> tuple[builtins.list[Any], str]:
        """All objects, of each what `keep` makes of it before the next page comes, and the list's resource version."""
        items: builtins.list[Any] = []
        token: str | None = None
        while True:
            query = [("limit", str(PAGE))]
            query += [("labelSelector", labels)] if labels else []
            query += [("fieldSelector", fields)] if fields else []
            query += [("continue", token)] if token else []
            page = await self._send("GET", "list", kind, namespace, None, query=query)
            for item in page["items"]:
                # Members of a list come without these two.
                item = {"apiVersion": kind.api_version, "kind": kind.kind, **item}
                items.append(item if keep is None else keep(item))
            head = page["metadata"]
            # Before the next page comes and is unpacked.
            del page
            token = head.get("continue")
            if not token:
                return items, str(head.get("resourceVersion", ""))

    async def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        query = [("fieldManager", names.MANAGER), ("fieldValidation", "Strict")]
        name = str(body["metadata"]["name"])
        return await self._send("POST", "create", kind, namespace, None, query=query, body=body, shown=name)

    async def apply(
        self, kind: Kind, body: Object, *, subresource: str | None = None, dry_run: bool = False, new: bool = False
    ) -> Object:
        """Server-side apply: the whole intent every time; conflicts are forced, since these objects are ours.

        `new`: only if there is no object of that name yet; else it is refused with a 409. A create would do so, too,
        but not record the fields as applied, and what we want no longer would then stay for ever.
        """
        query = [("fieldManager", names.MANAGER), ("force", "true"), ("fieldValidation", "Strict")]
        query += [("dryRun", "All")] if dry_run else []
        meta = body["metadata"]
        if new:
            body = {**body, "metadata": {**meta, "resourceVersion": _NO_OBJECTS_VERSION}}
        return await self._send(
            "PATCH",
            "patch",
            kind,
            meta["namespace"],
            meta["name"],
            query=query,
            body=body,
            content_type=_APPLY,
            subresource=subresource,
        )

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str, version: str | None = None, grace: int | None = None
    ) -> None:
        """Only the object of this uid and, where given, of this resource version: else it is refused with a 409.

        `grace`: seconds for a pod to end, in place of its own terminationGracePeriodSeconds.
        """
        body: Object = {"preconditions": _preconditions(uid, version), "propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        await self._maybe("delete", kind, namespace, name, method="DELETE", body=body)

    async def evict(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        """Delete a pod if its disruption budget lets it go; a budget without room refuses it with a 429.

        By its uid alone: the budget is charged before versions are compared, so that a conflict would leave it without
        room, for two minutes, for a pod that never goes.
        """
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": namespace, "name": name},
            "deleteOptions": {"preconditions": _preconditions(uid, None)},
        }
        await self._send("POST", "create", kind, namespace, name, body=body, subresource="eviction")

    async def annotate(self, kind: Kind, namespace: str, name: str, *, uid: str, annotations: dict[str, str]) -> Object:
        """Set these annotations and nothing else: of an object that is somebody else's an apply would say too much."""
        body = {"metadata": {"uid": uid, "annotations": annotations}}
        query = [("fieldManager", names.MANAGER)]
        return await self._send("PATCH", "patch", kind, namespace, name, query=query, body=body, content_type=_MERGE)

    async def own_rules(self, namespace: str) -> tuple[builtins.list[Object], bool]:
        """What this process may do in a namespace, and whether the API server knows that this is all."""
        body = {"apiVersion": REVIEW.api_version, "kind": REVIEW.kind, "spec": {"namespace": namespace}}
        status = (await self._send("POST", "create", REVIEW, None, None, body=body))["status"]
        return status["resourceRules"], not status.get("incomplete", False)

    async def replace(self, kind: Kind, body: Object) -> Object:
        """Refused with a 409 unless the object still has the resource version of `body`."""
        meta = body["metadata"]
        query = [("fieldManager", names.MANAGER)]
        return await self._send("PUT", "update", kind, meta["namespace"], meta["name"], query=query, body=body)

    async def watch(self, kind: Kind, namespace: str, name: str, version: str, seconds: float) -> AsyncIterator[Object]:
        """Changes of one object since a resource version, for so long."""
        query = [("watch", "true"), ("fieldSelector", f"metadata.name={name}"), ("resourceVersion", version)]
        query += [("timeoutSeconds", str(math.ceil(seconds)))]
        headers = {"Accept": "application/json"}
        limits = aiohttp.ClientTimeout(total=seconds + 5, sock_connect=5)
        try:
            response = await self._open("GET", kind.path(namespace), query, headers, limits=limits)
            async with response:
                if response.status != 200:
                    text = _message(await response.read())
                    raise ApiError(code=response.status, text=text, verb="watch", kind=kind, name=name)
                async for line in response.content:
                    yield json.loads(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(code=0, text=str(error), verb="watch", kind=kind, name=name) from error

    async def _maybe(self, verb: str, kind: Kind, namespace: str, name: str, **rest: Any) -> Object | None:
        method = rest.pop("method", "GET")
        try:
            return await self._send(method, verb, kind, namespace, name, **rest)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def _send(self, method: str, verb: str, kind: Kind, *arguments: Any, **rest: Any) -> Object:
        try:
            answer = await self._exchange(method, verb, kind, *arguments, **rest)
        except ApiError as error:
            self.on_answer(verb, kind, error.code)
            raise
        self.on_answer(verb, kind, 200)
        if verb in ("create", "patch") and "resourceVersion" in answer.get("metadata", {}):
            self.on_written(kind, answer)
        return answer

    async def _exchange(
        self,
        method: str,
        verb: str,
        kind: Kind,
        namespace: str | None,
        name: str | None,
        *,
        query: builtins.list[tuple[str, str]] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        subresource: str | None = None,
        shown: str | None = None,
    ) -> Object:
        path = kind.path(namespace, name) + (f"/{subresource}" if subresource else "")
        headers = {"Accept": accept, "Content-Type": content_type}
        label = f"{name or shown or ''}{'/' + subresource if subresource else ''}"
        if verb not in _READS and kind not in (LEASE, REVIEW) and not self.may_write():
            raise ApiError(code=0, text="this process may no longer act", verb=verb, kind=kind, name=label)
        try:
            response = await self._open(method, path, query or [], headers, body)
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            text = str(error) or type(error).__name__
            raise ApiError(code=0, text=text, verb=verb, kind=kind, name=label) from error
        except ApiException as error:
            raise ApiError(code=error.status or 0, text=str(error.reason), verb=verb, kind=kind, name=label) from error
        if not 200 <= response.status <= 299:
            raise ApiError(code=response.status, text=_message(data), verb=verb, kind=kind, name=label)
        parsed: Object = json.loads(data)
        return parsed

    async def _open(
        self,
        method: str,
        path: str,
        query: builtins.list[tuple[str, str]],
        headers: dict[str, str],
        body: Object | None = None,
        limits: aiohttp.ClientTimeout = _TIMEOUT,
    ) -> aiohttp.ClientResponse:
        """The answer's head; its body is still to be read."""
        method, url, headers, _, _ = await self._client.param_serialize(
            method, path, query_params=query, header_params=headers, auth_settings=["BearerToken"]
        )
        # The body is not given to it: it would look through each for objects of its own classes.
        answer = await self._client.call_api(method, url, headers, body, _request_timeout=limits)
        response: aiohttp.ClientResponse = answer.response
        return response


def _preconditions(uid: str, version: str | None) -> Object:
    return {"uid": uid} if version is None else {"uid": uid, "resourceVersion": version}


def _message(data: bytes) -> str:
    """The API server's own words, or what a proxy in between said."""
    try:
        status = json.loads(data)
        text = str(status["message"])
        causes = [str(cause["message"]) for cause in (status.get("details") or {}).get("causes") or ()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return data.decode(errors="replace").strip()[:500]
    # Of a refused eviction only the causes name the budget, and what it lacks.
    return " ".join([text, *(f"({cause})" for cause in causes if cause not in text)])
