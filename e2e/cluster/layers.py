"""Image layers that are folders: unpacked once, described as OCI images, used in place by every node."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import stat
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from e2e.cluster.containerfile import Containerfile
from e2e.cluster.paths import Paths, digest, discard, fresh

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
NODE_STORE = "/kind/store"  # where a node sees Paths.store
UNUSED_DAYS = 14
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True)
class Layer:
    """One unpacked layer: its folder's name in the store, and digest and size of the tar that it would make."""

    name: str
    diff_id: str
    size: int


@dataclass(frozen=True)
class Image:
    """A name, the layers from the bottom up, and what is run how."""

    reference: str
    layers: tuple[Layer, ...]
    config: Containerfile


def layer(name: str, paths: Paths, fill: Callable[[Path], None]) -> Layer:
    """The layer of that name (which must change with its content), filled by `fill` if it is not there."""
    folder = paths.store / "layers" / name
    facts = folder / "layer.json"
    if not facts.exists():
        with fresh(folder, paths) as part:
            root = part / "fs"
            root.mkdir()
            fill(root)
            diff_id, size = measure(root)
            (part / "layer.json").write_text(json.dumps({"diff_id": diff_id, "size": size}))
    os.utime(folder)  # `prune` goes by the last use
    stored = json.loads(facts.read_text())
    return Layer(name, stored["diff_id"], stored["size"])


class _Sum:
    """A file to write to that keeps only digest and length."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return len(data)


def measure(root: Path) -> tuple[str, int]:
    """Digest and size of the folder's tar, which is not kept."""
    total = _Sum()
    write_tar(total, root)  # type: ignore[arg-type]
    return f"sha256:{total.sha256.hexdigest()}", total.size


def write_tar(out: IO[bytes], *roots: Path) -> None:
    """The same bytes for the same content: sorted, no times, no names, hard links written as files.

    Of a path that several roots have, the last one's is taken: Docker refuses an archive that has it twice.
    """
    entries = {str(path.relative_to(root)): path for root in roots for path in _walk(root)}
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:
        tar.copybufsize = 1 << 20  # type: ignore[attr-defined]  # a file of half a gigabyte in 16 KiB bites is slow
        for name, path in sorted(entries.items()):
            info = tarfile.TarInfo(name)
            facts = path.lstat()
            info.mode, info.uid, info.gid = stat.S_IMODE(facts.st_mode), facts.st_uid, facts.st_gid
            if stat.S_ISLNK(facts.st_mode):
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
                tar.addfile(info)
            elif stat.S_ISDIR(facts.st_mode):
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            elif stat.S_ISREG(facts.st_mode):
                info.size = facts.st_size
                with path.open("rb") as content:
                    tar.addfile(info, content)


def _walk(root: Path) -> Iterable[Path]:
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            yield Path(folder) / name


def _blob(data: Any) -> tuple[str, bytes]:
    raw = json.dumps(data, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest(), raw


def describe(image: Image, machine: str = "") -> dict[str, Any]:
    """The OCI configuration and manifest of an image."""
    config = {
        "architecture": ARCHITECTURES[machine or platform.machine()],
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "User": image.config.user,
            "WorkingDir": image.config.workdir,
            "Entrypoint": image.config.entrypoint,
            "Env": [f"{name}={value}" for name, value in image.config.env.items()],
            "ExposedPorts": {port: {} for port in image.config.ports},
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in image.layers]},
    }
    name, raw = _blob(config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": f"sha256:{name}", "size": len(raw)},
        "layers": [{"mediaType": LAYER_TYPE, "digest": each.diff_id, "size": each.size} for each in image.layers],
    }
    return {"config": config, "manifest": manifest}


def snapshots(images: Sequence[Image]) -> list[tuple[str, str, str]]:
    """(chain id, parent's chain id or "-", folder in the node) of every layer, parents first, each once."""
    rows: dict[str, tuple[str, str, str]] = {}
    for image in images:
        parent = "-"
        for each in image.layers:
            chain = each.diff_id
            if parent != "-":
                chain = "sha256:" + hashlib.sha256(f"{parent} {each.diff_id}".encode()).hexdigest()
            rows.setdefault(chain, (chain, parent, f"{NODE_STORE}/layers/{each.name}/fs"))
            parent = chain
    return list(rows.values())


def bundle(images: Sequence[Image], paths: Paths) -> str:
    """Store the description of some images for a node to adopt; the name of its folder in the store.

    The archive holds manifests and configurations and no layer: the node's snapshots of them are links
    into the store, so that gigabytes are neither copied nor unpacked, and all nodes share one page cache.
    """
    blobs: dict[str, bytes] = {}
    index: dict[str, Any] = {"schemaVersion": 2, "manifests": []}
    for image in images:
        described = describe(image)
        for part in described.values():
            name, raw = _blob(part)
            blobs[name] = raw
        name, raw = _blob(described["manifest"])
        index["manifests"].append({
            "mediaType": MANIFEST_TYPE, "digest": f"sha256:{name}", "size": len(raw),
            "annotations": {"io.containerd.image.name": image.reference},
        })  # fmt: skip
    rows = snapshots(images)
    folder = f"bundles/{digest([json.dumps(index), repr(rows)])}"
    if not (paths.store / folder).exists():
        with fresh(paths.store / folder, paths) as part:
            with tarfile.open(part / "images.tar", "w") as tar:
                _add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
                _add(tar, "index.json", json.dumps(index).encode())
                for name, raw in blobs.items():
                    _add(tar, f"blobs/sha256/{name}", raw)
            (part / "snapshots").write_text("".join(" ".join(row) + "\n" for row in rows))
    os.utime(paths.store / folder)
    return folder


def prune(paths: Paths, now: float) -> list[str]:
    """Delete layers and bundles unused for a while. Only while no node runs: it uses them in place."""
    old = [each for kind in ("layers", "bundles") for each in (paths.store / kind).glob("*")
           if now - each.stat().st_mtime > UNUSED_DAYS * 86400]  # fmt: skip
    for each in old:
        discard(each)
    return sorted(each.name for each in old)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
