"""The node image for machines that cannot pull kind's own: Debian, the Go programs, and files/node/."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import debian, golang
from e2e.cluster.containerfile import Containerfile
from e2e.cluster.docker import Docker
from e2e.cluster.errors import Failed
from e2e.cluster.layers import Image, Layer, bundle, layer, write_tar
from e2e.cluster.machine import Facts
from e2e.cluster.paths import HERE, Paths, digest, discard, fresh
from e2e.cluster.progress import Phase

REPOSITORY = "localhost/node"  # kubeadm is told to take its images from here
NODENET, PAUSE = f"{REPOSITORY}/nodenet:1", f"{REPOSITORY}/pause:1"
ETCD_TAG, COREDNS_TAG = "3.6.8-0", "v1.14.2"  # what kubeadm of this release asks for, and what gomods/ builds
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "nodenet")
NODE_PROGRAMS = ("kubelet", "kubeadm", "kubectl")

FILES = HERE / "files" / "node"
ENABLED = ("containerd.service", "adopt-system-images.service", "kubelet.service")
MASKED = (
    "systemd-binfmt.service", "getty.target", "console-getty.service", "systemd-logind.service",
    "systemd-udevd.service", "systemd-udev-trigger.service", "systemd-networkd.service", "systemd-resolved.service",
    "systemd-timesyncd.service", "systemd-tmpfiles-setup-dev.service", "apt-daily.timer", "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer",
)  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """What a node image is made of."""

    root: Layer
    kubernetes: Path
    containerd: Path
    cni: Path
    system: str  # the bundle of the control plane's images


def root_layer(paths: Paths, phase: Phase) -> Layer:
    """The Debian below a node and below kube-proxy, which calls its iptables."""
    name = f"node-root-{digest([*debian.NODE_PACKAGES, debian.SUITE])}"

    def fill(root: Path) -> None:
        debian.bootstrap(root, debian.NODE_PACKAGES, paths, phase)
        # Debian enables what a container has no use for; ENABLED says what a node runs.
        for wants in (root / "etc/systemd/system").glob("*.wants"):
            shutil.rmtree(wants)

    return layer(name, paths, fill)


def parts(paths: Paths, root: Layer, binaries: dict[str, Path]) -> Parts:
    """Make the layers and the bundle of the control plane's images."""
    kubernetes = binaries["kubernetes"]

    def fill_kube(target: Path) -> None:
        folder = _folder(target, "usr/local/bin")
        shutil.copy2(kubernetes / "kube", folder / "kube")
        for program in PROGRAMS:
            (folder / program).symlink_to("kube")

    def fill_with(program: str) -> Layer:
        def fill(target: Path) -> None:
            shutil.copy2(kubernetes / program, _folder(target, "usr/local/bin") / program)

        return layer(f"{program}-{kubernetes.name}", paths, fill)

    kube = layer(f"kube-{kubernetes.name}", paths, fill_kube)

    def image(reference: str, program: str, *layers: Layer) -> Image:
        return Image(
            reference,
            layers,
            Containerfile(
                entrypoint=[f"/usr/local/bin/{program}"],
                env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            ),
        )

    images = [image(f"{REPOSITORY}/{program}:{golang.KUBERNETES}", program, kube) for program in PROGRAMS[:3]]
    images.append(image(f"{REPOSITORY}/kube-proxy:{golang.KUBERNETES}", "kube-proxy", root, kube))
    images.append(image(NODENET, "nodenet", root, kube))
    images.append(image(PAUSE, "pause", fill_with("pause")))
    images.append(image(f"{REPOSITORY}/etcd:{ETCD_TAG}", "etcd", fill_with("etcd")))
    images.append(image(f"{REPOSITORY}/coredns:{COREDNS_TAG}", "coredns", fill_with("coredns")))
    return Parts(root, kubernetes, binaries["containerd"], binaries["cni"], bundle(images, paths))


def containerd_config(facts: Facts) -> str:
    """containerd's configuration on a node."""
    # A pod's sandbox asks for a negative score, which takes CAP_SYS_RESOURCE; runc then dies without saying why.
    restrict = "false" if facts.sys_resource else "true"
    return f"""version = 3

[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{PAUSE}"

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = {restrict}
tolerate_missing_hugetlb_controller = true

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["/opt/cni/bin"]
conf_dir = "/etc/cni/net.d"

[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "runc"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = true
"""


def kubelet_arguments(facts: Facts) -> str:
    """Arguments that kubeadm does not know about."""
    arguments = ["--resolv-conf=/kind/resolv.conf", "--runtime-cgroups=/system.slice/containerd.service"]
    if not facts.cgroup_v2:
        arguments.append("--fail-cgroupv1=false")
    return f"KUBELET_EXTRA_ARGS={' '.join(arguments)}\n"


def reference(facts: Facts, made_of: Parts) -> str:
    """The image's name; its tag changes with anything that goes into it."""
    tag = digest([FILES, HERE / "nodeimage.py", containerd_config(facts), kubelet_arguments(facts), made_of.root.name,
                  made_of.kubernetes.name, made_of.containerd.name, made_of.cni.name, made_of.system])  # fmt: skip
    return f"{REPOSITORY}/image:{golang.KUBERNETES}-{tag}"


def build(docker: Docker, facts: Facts, made_of: Parts, paths: Paths) -> str:
    """Put the image into Docker if it is not there; its name."""
    name = reference(facts, made_of)
    if docker.ok("image", "inspect", name):
        return name
    top = paths.tmp / f"node-top-{name.rpartition('-')[2]}"
    discard(top)
    with fresh(top, paths) as part:
        _fill_top(part, facts, made_of)
    try:
        _import(docker, name, [paths.store / "layers" / made_of.root.name / "fs", top])
    finally:
        discard(top)
    return name


def _fill_top(top: Path, facts: Facts, made_of: Parts) -> None:
    shutil.copytree(FILES, top, dirs_exist_ok=True)
    _write(top / "etc/containerd/config.toml", containerd_config(facts))
    _write(top / "etc/default/kubelet", kubelet_arguments(facts))
    _write(top / "etc/systemd/journald.conf.d/node.conf", "[Journal]\nReadKMsg=no\n")  # the machine's own log
    _write(top / "kind/version", golang.KUBERNETES)  # kind wants no newline
    _write(top / "kind/system-bundle", made_of.system)
    for folder in ("etc/kubernetes/manifests", "etc/cni/net.d", "kind/store"):
        _folder(top, folder)
    shutil.copy2(made_of.kubernetes / "kube", _folder(top, "usr/bin") / "kube")
    for program in NODE_PROGRAMS:
        (top / "usr/bin" / program).symlink_to("kube")
    shutil.copytree(made_of.containerd, top / "usr/local/bin", dirs_exist_ok=True)
    shutil.copytree(made_of.cni, top / "opt/cni/bin", dirs_exist_ok=True)
    units = _folder(top, "etc/systemd/system")
    (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
    for unit in ENABLED:
        (_folder(units, "multi-user.target.wants") / unit).symlink_to(f"/etc/systemd/system/{unit}")
    for unit in MASKED:
        (units / unit).symlink_to("/dev/null")


def _import(docker: Docker, name: str, roots: list[Path]) -> None:
    entry = 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]'
    take = docker.command("import", "--change", "ENV container=docker", "--change", entry, "-", name)
    with subprocess.Popen(take, stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                          env=docker.environment()) as importing:  # fmt: skip
        assert importing.stdin is not None
        assert importing.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # what Docker says about it comes on stderr
            write_tar(importing.stdin, *roots)
            importing.stdin.close()
        complaint = importing.stderr.read().decode(errors="replace").strip()
    if importing.returncode:
        raise Failed(f"docker import of the node image: {complaint}")


def _folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
