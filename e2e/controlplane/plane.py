"""etcd, kube-apiserver and kube-controller-manager: certificates, flags, start, restart and end."""

from __future__ import annotations

import json
import secrets
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from e2e.cluster.golang import KUBERNETES
from e2e.cluster.shell import run
from e2e.controlplane.daemon import Daemon, free_port
from e2e.controlplane.programs import Programs

HOST = "127.0.0.1"

READY_SECONDS = 90.0
"""A control plane is ready in seconds; on a machine that compiles beside it, in many."""

ADMIN, KUBELETS, CONTROLLERS = "admin", "kubelets", "controllers"
"""Users of the token file; all of them may do everything."""

_CONTROLLERS = (
    "statefulset-controller",
    "deployment-controller",
    "replicaset-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "serviceaccount-controller",
    "disruption-controller",
    "resourcequota-controller",
    "horizontal-pod-autoscaler-controller",
)

_AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "omitManagedFields": True,
    "rules": [
        # Autoscalers work as a controller.
        {"level": "Metadata", "resources": [{"group": "glm52.dev", "resources": ["glm52deployments/scale"]}]},
        # What the rest of the cluster does is not asked about, and would be most of the log.
        {"level": "None", "users": [KUBELETS, CONTROLLERS, "system:apiserver"]},
        {"level": "Metadata"},
    ],
}


class Broken(AssertionError):
    """A part of the control plane ended, or did not become ready; the text holds its last words."""


class ControlPlane:
    """`folder` takes certificates, data and logs; nothing is written elsewhere."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "pki/ca.crt"
        self.audit_log = folder / "audit.log"
        self.port = free_port()
        self.server = f"https://{HOST}:{self.port}"
        self.tokens = {user: secrets.token_hex(16) for user in (ADMIN, KUBELETS, CONTROLLERS)}
        self._programs = programs
        self._etcd_port = free_port()
        self._certificates()
        self._etcd = self._make_etcd()
        self._apiserver = self._make_apiserver()
        self._controllers = self._make_controllers()

    def program(self, name: str) -> Path:
        """One of the many that `kube` is."""
        return self._programs.called(name, self.folder / "bin")

    def start(self) -> None:
        self._etcd.start()
        self._apiserver.start()
        self._until_ready()
        self._controllers.start()

    def stop(self) -> None:
        # What asks goes before what answers, or each would spend its end on retries.
        for daemon in (self._controllers, self._apiserver, self._etcd):
            daemon.kill()

    def stop_apiserver(self) -> None:
        self._apiserver.kill()

    def start_apiserver(self) -> None:
        self._apiserver.start()
        self._until_ready()

    def restart_apiserver(self) -> None:
        """Every connection breaks, and watches can no longer go on from where they were."""
        self.stop_apiserver()
        self.start_apiserver()

    def kubeconfig(self, file: Path, token: str, *, server: str | None = None, namespace: str = "default") -> Path:
        """Write a kubeconfig for a bearer token; `server` for one that goes through a proxy."""
        cluster = {"server": server or self.server, "certificate-authority": str(self.ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "current-context": "x",
        }
        file.write_text(yaml.safe_dump(config))
        return file

    def _certificates(self) -> None:
        # kubeadm makes them all, so no tool for certificates is needed.
        kubeadm = self.program("kubeadm")
        # The version is named, or it would be looked up on the internet; an address of loopback it takes only beside
        # another one.
        certs: list[str | Path] = [kubeadm, "init", "phase", "certs"]
        to = [f"--cert-dir={self.ca.parent}", f"--kubernetes-version={KUBERNETES}"]
        run([*certs, "ca", *to])
        run([*certs, "sa", f"--cert-dir={self.ca.parent}"])
        run([*certs, "apiserver", *to, "--apiserver-advertise-address=10.0.0.1", f"--apiserver-cert-extra-sans={HOST}"])

    def _make_etcd(self) -> Daemon:
        client, peer = f"http://{HOST}:{self._etcd_port}", f"http://{HOST}:{free_port()}"
        flags = {
            "name": "e",
            "data-dir": self.folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"e={peer}",
            "unsafe-no-fsync": "true",
            "log-level": "warn",
        }
        return Daemon([self._programs.etcd, *_flags(flags)], self.folder / "etcd.log")

    def _make_apiserver(self) -> Daemon:
        policy, tokens = self.folder / "audit.yaml", self.folder / "tokens.csv"
        policy.write_text(json.dumps(_AUDIT))
        tokens.write_text("".join(f"{token},{user},{user},system:masters\n" for user, token in self.tokens.items()))
        pki = self.ca.parent
        flags = {
            "etcd-servers": f"http://{HOST}:{self._etcd_port}",
            "bind-address": HOST,
            "secure-port": self.port,
            "endpoint-reconciler-type": "none",
            "service-cluster-ip-range": "10.96.0.0/16",
            "client-ca-file": self.ca,
            "tls-cert-file": pki / "apiserver.crt",
            "tls-private-key-file": pki / "apiserver.key",
            "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
            "service-account-key-file": pki / "sa.pub",
            "service-account-signing-key-file": pki / "sa.key",
            "authorization-mode": "RBAC",
            "token-auth-file": tokens,
            # Nothing would ever take the taint of a new node off again.
            "disable-admission-plugins": "TaintNodesByCondition",
            "audit-policy-file": policy,
            "audit-log-path": self.audit_log,
        }
        binary = self.program("kube-apiserver")
        return Daemon([binary, *_flags(flags)], self.folder / "kube-apiserver.log")

    def _make_controllers(self) -> Daemon:
        flags = {
            "kubeconfig": self.kubeconfig(self.folder / "controllers.kubeconfig", self.tokens[CONTROLLERS]),
            "controllers": ",".join(_CONTROLLERS),
            "leader-elect": "false",
            "bind-address": HOST,
            "secure-port": free_port(),
            # 20 requests a second, the default, are for clusters that others work in, too.
            "kube-api-qps": 500,
            "kube-api-burst": 1000,
            # Autoscalers look every 15 s by default, and for minutes at no pod that has just started.
            "horizontal-pod-autoscaler-sync-period": "1s",
            "horizontal-pod-autoscaler-cpu-initialization-period": "1s",
            "horizontal-pod-autoscaler-initial-readiness-delay": "1s",
        }
        binary = self.program("kube-controller-manager")
        return Daemon([binary, *_flags(flags)], self.folder / "kube-controller-manager.log")

    def _until_ready(self) -> None:
        context = ssl.create_default_context(cafile=str(self.ca))
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            for daemon in (self._etcd, self._apiserver):
                if not daemon.running():
                    raise Broken(f"{Path(daemon.argv[0]).name} ended ({daemon.code()}):\n{daemon.text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.server}/readyz", timeout=5, context=context):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise Broken(f"kube-apiserver is not ready after {READY_SECONDS:.0f} s:\n{self._apiserver.text()[-3000:]}")


def _flags(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]
