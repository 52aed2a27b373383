"""Layers: the same content gives the same digest, whatever its times and links; nodes get parents first."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

from e2e.cluster.containerfile import Containerfile
from e2e.cluster.layers import Image, Layer, bundle, describe, layer, measure, snapshots, write_tar
from e2e.cluster.paths import Paths

BASE = Layer("base-1", "sha256:" + "a" * 64, 10)
DEPS = Layer("deps-1", "sha256:" + "b" * 64, 20)
CODE = Layer("code-1", "sha256:" + "c" * 64, 30)


def tree(root: Path) -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "tool").write_text("#!/bin/sh\n")
    (root / "bin" / "tool").chmod(0o755)
    (root / "bin" / "alias").symlink_to("tool")
    return root


def test_digest_ignores_times_and_hard_links(tmp_path: Path) -> None:
    one, other = tree(tmp_path / "one"), tree(tmp_path / "other")
    os.utime(other / "bin" / "tool", (1, 1))
    os.link(other / "bin" / "tool", tmp_path / "elsewhere")
    assert measure(one) == measure(other)


def test_digest_sees_content_and_mode(tmp_path: Path) -> None:
    one, other = tree(tmp_path / "one"), tree(tmp_path / "other")
    (other / "bin" / "tool").chmod(0o700)
    assert measure(one) != measure(other)


def test_digest_is_that_of_the_tar(tmp_path: Path) -> None:
    out = io.BytesIO()
    write_tar(out, tree(tmp_path / "one"))
    assert measure(tmp_path / "one") == (f"sha256:{hashlib.sha256(out.getvalue()).hexdigest()}", len(out.getvalue()))


def test_a_path_of_two_roots_is_written_once_from_the_last(tmp_path: Path) -> None:
    one, other = tree(tmp_path / "one"), tree(tmp_path / "other")
    (other / "bin" / "tool").write_text("newer")
    out = io.BytesIO()
    write_tar(out, one, other)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        assert tar.getnames() == ["bin", "bin/alias", "bin/tool"]
        tool = tar.extractfile("bin/tool")
        assert tool is not None
        assert tool.read() == b"newer"


def test_a_killed_build_is_made_again(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    (tmp_path / "tmp" / f"x-1.{os.getpid()}.part" / "fs").mkdir(parents=True)  # what a kill leaves

    def fill(root: Path) -> None:
        (root / "file").write_text("1")

    def never(root: Path) -> None:
        raise AssertionError(f"{root} is filled twice")

    first = layer("x-1", paths, fill)
    again = layer("x-1", paths, never)
    assert first == again
    assert [each.name for each in (paths.store / "layers" / "x-1" / "fs").iterdir()] == ["file"]
    assert list(paths.tmp.iterdir()) == []


def test_snapshots_come_parents_first_and_once() -> None:
    config = Containerfile()
    rows = snapshots([Image("one", (BASE, DEPS), config), Image("two", (BASE, CODE), config)])
    chain = "sha256:" + hashlib.sha256(f"{BASE.diff_id} {DEPS.diff_id}".encode()).hexdigest()
    assert rows[0] == (BASE.diff_id, "-", "/kind/store/layers/base-1/fs")
    assert rows[1] == (chain, BASE.diff_id, "/kind/store/layers/deps-1/fs")
    assert [row[1] for row in rows] == ["-", BASE.diff_id, BASE.diff_id]


def test_description_says_what_the_containerfile_says() -> None:
    config = Containerfile(user="1:1", entrypoint=["go"], env={"A": "b"}, ports=["1/tcp"])
    described = describe(Image("name:tag", (BASE, DEPS), config), machine="x86_64")
    assert described["config"]["config"]["User"] == "1:1"
    assert described["config"]["config"]["Env"] == ["A=b"]
    assert described["config"]["rootfs"]["diff_ids"] == [BASE.diff_id, DEPS.diff_id]
    assert [each["size"] for each in described["manifest"]["layers"]] == [10, 20]


def test_a_bundle_holds_no_layer(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    folder = paths.store / bundle([Image("name:tag", (BASE, CODE), Containerfile())], paths)
    with tarfile.open(folder / "images.tar") as tar:
        index = tar.extractfile("index.json")
        assert index is not None
        (manifest,) = json.load(index)["manifests"]
        assert manifest["annotations"] == {"io.containerd.image.name": "name:tag"}
        blobs = [name for name in tar.getnames() if name.startswith("blobs/")]
        assert len(blobs) == 2  # the manifest and the configuration
    assert len((folder / "snapshots").read_text().splitlines()) == 2
