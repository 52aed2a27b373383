"""The programs of the control plane, built like those of the local cluster and kept beside them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import golang
from e2e.cluster.paths import Paths, find
from e2e.cluster.progress import Progress

KUBERNETES = next(module for module in golang.NODE_MODULES if module.name == "kubernetes")
"""The module that the node image is made of, and not a smaller one: what one of the two builds serves the other."""


@dataclass(frozen=True)
class Programs:
    etcd: Path
    kube: Path
    """Every Kubernetes program in one; the name it is called by picks one."""
    helm: Path

    def called(self, name: str, folder: Path) -> Path:
        """A link in `folder` by which `kube` is the program of that name."""
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(self.kube)
        return link


def programs(paths: Paths | None = None) -> Programs:
    """Build what is missing: minutes on a machine that never did, nothing afterwards."""
    paths = paths or find(os.environ)
    if not golang.built(KUBERNETES, paths):
        with Progress().phase("Go programs") as phase:
            golang.build(KUBERNETES, paths, golang.toolchain(paths, phase), phase)
    folder = golang.folder(KUBERNETES, paths)
    return Programs(folder / "etcd", folder / "kube", folder / "helm")
