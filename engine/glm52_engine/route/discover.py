"""Keeps Pools up to date: by watching EndpointSlices, or from URLs given on the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp

from glm52_engine.config import READYZ, ConfigError, DiscoveryConfig, Role
from glm52_engine.route.pools import Pools
from glm52_engine.route.slices import SliceStore

log = logging.getLogger(__name__)

WATCH_SECONDS = 60
"""The API server ends a watch after this; the next goes on where it ended."""

SILENCE_SECONDS = WATCH_SECONDS + 15
"""A watch that is silent for longer is a dead connection."""

RETRY_SECONDS = (0.2, 5.0)
STATIC_CHECK_SECONDS = 0.5
_ACCEPT = {"Accept": "application/json"}


async def discover(config: DiscoveryConfig, pools: Pools, on_synced: Callable[[], None]) -> None:
    """Runs forever. While the API server is away the last known pods stay."""
    from kubernetes.aio import client

    await load_cluster_config()
    synced: set[Role] = set()

    def first_list(role: Role) -> None:
        synced.add(role)
        if len(synced) == 2:
            on_synced()

    async with client.ApiClient() as api_client:
        await asyncio.gather(
            follow(api_client, config, "prefill", pools, first_list),
            follow(api_client, config, "decode", pools, first_list),
        )


async def load_cluster_config() -> None:
    from kubernetes.aio import config

    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except config.ConfigException:
        try:
            await config.load_kube_config()  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            hint = "or give --prefill-url and --decode-url"
            raise ConfigError(f"discovery: no cluster to watch ({error}); {hint}") from error


async def follow(
    client: Any, config: DiscoveryConfig, role: Role, pools: Pools, on_list: Callable[[Role], None]
) -> None:
    """List, then watch from there; list again after anything unusual. Never polls."""
    namespace, service, hosts = config.of(role)
    store = SliceStore(hosts)
    pause = RETRY_SECONDS[0]
    while True:
        try:
            store.replace(await _list(client, namespace, service))
            pools.update(role, store.urls())
            on_list(role)
            pause = RETRY_SECONDS[0]
            while await _watch(client, namespace, service, store, lambda: pools.update(role, store.urls())):
                pass
        except Exception as error:
            log.warning("watch broke, listing again", extra={"service": service, "reason": _one_line(error)})
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, RETRY_SECONDS[1])


def _one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:500]


async def _get(client: Any, namespace: str, query: dict[str, str], limits: aiohttp.ClientTimeout) -> Any:
    """GET EndpointSlices, unread. The generated methods refuse a timeout for silence alone, so they are not used."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    request = await client.param_serialize(
        "GET", path, query_params=list(query.items()), header_params=_ACCEPT, auth_settings=["BearerToken"]
    )
    return (await client.call_api(*request, _request_timeout=limits)).response


async def _list(client: Any, namespace: str, service: str) -> dict[str, Any]:
    response = await _get(client, namespace, {"labelSelector": _selector(service)}, aiohttp.ClientTimeout(total=15))
    try:
        listing: dict[str, Any] = json.loads(await response.read())
    finally:
        response.release()
    if response.status != 200:
        raise RuntimeError(f"list answers {response.status}: {listing.get('message')}")
    return listing


async def _watch(client: Any, namespace: str, service: str, store: SliceStore, changed: Callable[[], None]) -> bool:
    """One watch until the server ends it. False: a new list is needed."""
    query = {
        "labelSelector": _selector(service),
        "watch": "true",
        "resourceVersion": store.version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(WATCH_SECONDS),
    }
    silence = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
    response = await _get(client, namespace, query, silence)
    try:
        if response.status != 200:
            return False
        async for line in lines(response.content.iter_any()):
            if not store.apply(json.loads(line)):
                return False
            changed()
        return True
    finally:
        response.close()


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines of any length: a slice of a large Service is longer than a reader's usual line limit."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield line


def _selector(service: str) -> str:
    return f"kubernetes.io/service-name={service}"


async def check_static(session: aiohttp.ClientSession, urls: dict[Role, Sequence[str]], pools: Pools) -> None:
    """Without Kubernetes nobody tells us who is ready, so ask: forever, every half second."""
    while True:
        for role, of_role in urls.items():
            answers = await asyncio.gather(*(_is_ready(session, url) for url in of_role))
            pools.update(role, frozenset(url for url, ready in zip(of_role, answers, strict=True) if ready))
        await asyncio.sleep(STATIC_CHECK_SECONDS)


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with session.get(url + READYZ, timeout=aiohttp.ClientTimeout(total=2)) as response:
            return response.status == 200
    return False
