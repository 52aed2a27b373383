"""metrics.k8s.io as a test says it is: what autoscalers of the cluster read about pods."""

from __future__ import annotations

import datetime
import json
import re
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from e2e.controlplane.client import Object
from e2e.controlplane.cluster import Cluster

GROUP, VERSION = "metrics.k8s.io", "v1beta1"
SERVICE = "metrics"

_PODS = re.compile(rf"/apis/{GROUP}/{VERSION}/namespaces/([^/]+)/pods")

Millicores = Callable[[str, list[Object]], dict[str, int]]
"""Of a namespace and the pods that somebody asks about: name → thousandths of a core."""


class MetricsApi:
    """An aggregated API server on loopback, whose name is an ExternalName: an endpoint may not lie there.

    `uses` is asked anew each time; pods that it leaves out have no metrics yet. `close` has to come before the
    namespace goes: while an API that is registered does not answer, no namespace can be deleted.
    """

    def __init__(self, cluster: Cluster, pki: Path, namespace: str, uses: Millicores) -> None:
        self._cluster = cluster
        self._uses = uses
        self._looks: Counter[str] = Counter()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pki / "apiserver.crt", pki / "apiserver.key")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, name="metrics-api", daemon=True).start()
        port = int(self._server.server_address[1])
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"namespace": namespace, "name": SERVICE},
                "spec": {"type": "ExternalName", "externalName": "localhost"},
            },
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": f"{VERSION}.{GROUP}"},
                "spec": {
                    "group": GROUP,
                    "version": VERSION,
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                    "insecureSkipTLSVerify": True,
                    "service": {"namespace": namespace, "name": SERVICE, "port": port},
                },
            },
        )

    def looks(self, namespace: str) -> int:
        """How often somebody has asked about a namespace's pods."""
        return self._looks[namespace]

    def close(self) -> None:
        self._cluster.delete("APIService", None, f"{VERSION}.{GROUP}")
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, target: str) -> Object | None:
        url = urlsplit(target)
        if url.path == f"/apis/{GROUP}/{VERSION}":
            served = {"name": "pods", "singularName": "", "namespaced": True, "kind": "PodMetrics", "verbs": ["list"]}
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/{VERSION}",
                "resources": [served],
            }
        found = _PODS.fullmatch(url.path)
        if found is None:
            return None
        namespace, selector = found.group(1), parse_qs(url.query).get("labelSelector", [""])[0]
        pods = self._cluster.listed("Pod", namespace, selector)
        items = [_metrics(namespace, name, uses) for name, uses in self._uses(namespace, pods).items()]
        self._looks[namespace] += 1
        return {"kind": "PodMetricsList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": items}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answer(self.path)
                body = json.dumps(found or {}).encode()
                self.send_response(200 if found is not None else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def _metrics(namespace: str, name: str, millicores: int) -> Object:
    return {
        "metadata": {"namespace": namespace, "name": name},
        "timestamp": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "window": "0s",
        "containers": [{"name": "engine", "usage": {"cpu": f"{millicores}m", "memory": "1Gi"}}],
    }
