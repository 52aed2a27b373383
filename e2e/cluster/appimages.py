"""The operator's and the engine's images: built from their Containerfiles, or as layers."""

from __future__ import annotations

import configparser
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import containerfile, debian
from e2e.cluster.docker import Docker
from e2e.cluster.errors import Failed
from e2e.cluster.layers import Image, Layer, bundle, layer
from e2e.cluster.paths import REPO, Paths, digest
from e2e.cluster.progress import Phase
from e2e.cluster.shell import follow, run

PYTHON = "3.11"
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"  # where Debian's python3 looks for what is not Debian's
RECIPE = "1"  # raise it when the same sources are to give other layers


@dataclass(frozen=True)
class App:
    """One image: its name, the projects whose code it holds, and a package that must never get into it."""

    name: str
    projects: tuple[str, ...]
    forbidden: str

    @property
    def containerfile(self) -> Path:
        return REPO / self.name / "Containerfile"

    @property
    def lock(self) -> Path:
        return REPO / "requirements" / f"{self.name}.lock"

    @property
    def reference(self) -> str:
        """Name and tag; the tag changes with anything that goes in, so a node never runs yesterday's code."""
        version = tomllib.loads((REPO / self.name / "pyproject.toml").read_text())["project"]["version"]
        return (
            f"localhost/glm52-{self.name}:{version}-{digest([self.lock, self.containerfile, *self.sources(), RECIPE])}"
        )

    def sources(self) -> list[Path]:
        return [
            path
            for project in self.projects
            for path in (REPO / project / f"glm52_{project}", REPO / project / "pyproject.toml")
        ]


OPERATOR = App("operator", ("engine", "operator"), forbidden="torch")
ENGINE = App("engine", ("engine",), forbidden="kopf")
APPS = (OPERATOR, ENGINE)


def base_layer(paths: Paths, phase: Phase) -> Layer:
    name = f"base-{digest([*debian.BASE_PACKAGES, debian.SUITE, RECIPE])}"
    return layer(name, paths, lambda root: debian.bootstrap(root, debian.BASE_PACKAGES, paths, phase))


def dependency_layer(app: App, base: Layer, paths: Paths, phase: Phase) -> Layer:
    """Everything that the app's lock file pins."""

    def fill(root: Path) -> None:
        site = root / SITE
        phase.note(f"packages of requirements/{app.lock.name}")
        target = ["--python-version", PYTHON, "--python-platform", f"{platform.machine()}-manylinux_2_36"]
        strict = ["--require-hashes", "--no-deps", "--only-binary=:all:"]
        run([*_uv(), *strict, *target, "--target", site, "-r", app.lock])
        shutil.rmtree(site / "bin", ignore_errors=True)  # their #! lines name this machine's Python
        check_content(app, site)
        phase.note(f"bytecode of requirements/{app.lock.name}")
        compile_bytecode(site, f"/{SITE}", paths.store / "layers" / base.name / "fs")

    return layer(f"{app.name}-deps-{digest([app.lock, RECIPE])}", paths, fill)


def code_layer(app: App, reference: str, base: Layer, paths: Paths) -> Layer:
    """The project's own code: the only layer that an edit changes."""
    tag = reference.rpartition("-")[2]

    def fill(root: Path) -> None:
        site = root / SITE
        run(
            [
                *_uv(),
                "--reinstall",
                "--no-deps",
                "--no-build-isolation",
                "--target",
                site,
                *(REPO / project for project in app.projects),
            ]
        )
        shutil.rmtree(site / "bin", ignore_errors=True)
        write_scripts(site, root / "usr/local/bin")
        check_content(app, site)
        compile_bytecode(site, f"/{SITE}", paths.store / "layers" / base.name / "fs")

    return layer(f"{app.name}-code-{tag}", paths, fill)


def build(app: App, base: Layer, paths: Paths, phase: Phase) -> Image:
    reference = app.reference  # once: an edit meanwhile must not give the image another name than its layer
    layers = (base, dependency_layer(app, base, paths, phase), code_layer(app, reference, base, paths))
    return Image(reference, layers, containerfile.read(app.containerfile))


def build_all(paths: Paths, phase: Phase) -> tuple[str, dict[str, str]]:
    """Both images as one bundle for the workers, and their references by name."""
    base = base_layer(paths, phase)
    images = {app.name: build(app, base, paths, phase) for app in APPS}
    return bundle(list(images.values()), paths), {name: image.reference for name, image in images.items()}


def build_with_docker(app: App, docker: Docker, phase: Phase) -> str:
    """The usual way, where the base image can be pulled."""
    reference = app.reference
    if not docker.ok("image", "inspect", reference):
        command = docker.command("build", "--file", str(app.containerfile), "--tag", reference, str(REPO))
        follow(command, phase.note, env=docker.variables())
    return reference


def send(docker: Docker, reference: str, node: str) -> None:
    """Copy an image from Docker into a node's containerd."""
    if docker.ok("exec", node, "ctr", "--namespace=k8s.io", "images", "label", reference, "glm52=1"):
        return
    take = docker.command("exec", "--interactive", node, "ctr", "--namespace=k8s.io", "images", "import", "-")
    with subprocess.Popen(docker.command("save", reference), stdout=subprocess.PIPE, env=docker.environment()) as save:
        done = subprocess.run(take, stdin=save.stdout, env=docker.environment(), capture_output=True, text=True)
    if done.returncode or save.returncode:
        raise Failed(f"{reference} did not get into {node}: {done.stderr.strip() or 'docker save failed'}")


def check_content(app: App, site: Path) -> None:
    """An image that holds what it must not is refused here, where the mistake is made."""
    if (site / app.forbidden).exists():
        raise Failed(f"the {app.name} image must not hold {app.forbidden}, and {app.lock} brings it in")


def write_scripts(site: Path, folder: Path) -> None:
    """The commands that the installed projects declare, for the image's own Python."""
    folder.mkdir(parents=True)
    for declared in sorted(site.glob("*.dist-info/entry_points.txt")):
        points = configparser.ConfigParser()
        points.optionxform = str  # type: ignore[assignment,method-assign]
        points.read_string(declared.read_text())
        for name, target in points["console_scripts"].items() if points.has_section("console_scripts") else ():
            module, _, function = target.partition(":")
            script = folder / name
            script.write_text(
                f"#!/usr/bin/python3\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
            )
            script.chmod(0o755)


def compile_bytecode(folder: Path, at: str, base: Path) -> None:
    """Compile with the image's own Python; the root is read-only later, and torch alone takes a minute.

    Unchecked hashes, not times: a layer's files have no times.
    """
    loader = next((base / "lib64").glob("ld-linux-*.so.*"), None) or next((base / "lib").glob("ld-linux-*.so.*"))
    libraries = ":".join(str(each) for each in sorted((base / "usr/lib").glob("*-linux-gnu")))
    assert loader is not None
    python: list[str | Path] = [loader, "--library-path", libraries, base / "usr/bin" / f"python{PYTHON}", "-S"]
    names: list[str | Path] = ["-s", folder, "-p", at, "-x", r"/tests?/|/testing/"]
    run(
        [
            *python,
            "-m",
            "compileall",
            "-q",
            "-j",
            str(os.cpu_count()),
            "--invalidation-mode",
            "unchecked-hash",
            *names,
            folder,
        ],
        env={"PYTHONHOME": str(base / "usr"), "PYTHONPATH": None},
    )


def _uv() -> list[str | Path]:
    return [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
