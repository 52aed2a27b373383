"""What a killed run leaves: found again by its folder, its cgroup and its mounts, and nothing else is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from e2e.cluster import daemon, debian, processes
from e2e.cluster.layers import prune
from e2e.cluster.mounts import mounted_below
from e2e.cluster.paths import Paths, digest, fresh, sweep, write_atomically

MOUNTS = """22 1 8:1 / / rw - ext4 /dev/vda rw
90 22 0:50 / /c/state/docker/data/overlay2/a/merged rw - overlay overlay rw
91 90 0:51 / /c/state/docker/data/overlay2/a/merged/sys/fs rw - sysfs sysfs rw
92 22 0:52 / /c/state/dockerish rw - tmpfs tmpfs rw
93 22 0:53 / /c/state/docker/with\\040space rw - tmpfs tmpfs rw
"""


def test_mounts_come_innermost_first_and_only_from_below() -> None:
    assert mounted_below(Path("/c/state/docker"), MOUNTS) == [
        "/c/state/docker/data/overlay2/a/merged/sys/fs",
        "/c/state/docker/data/overlay2/a/merged",
        "/c/state/docker/with space",
    ]


def test_processes_are_told_by_program_and_folder() -> None:
    ours = Path("/c/state/docker")
    assert processes.belongs("/usr/sbin/dockerd --config-file /c/state/docker/daemon.json", ours)
    assert processes.belongs("/usr/bin/containerd-shim-runc-v2 -address /c/state/docker/exec/containerd.sock", ours)
    assert not processes.belongs("/usr/sbin/dockerd --config-file /etc/docker/daemon.json", ours)
    assert not processes.belongs("/usr/sbin/dockerd --config-file /c/state/docker2/daemon.json", ours)
    assert not processes.belongs("vim /c/state/docker/daemon.json", ours)


def test_a_daemon_of_another_cache_is_told_from_ours_and_from_any_docker() -> None:
    command = "/usr/sbin/dockerd --config-file /c/state/docker/daemon.json"
    assert daemon.foreign_cache(command, Paths(Path("/c"))) is None
    assert daemon.foreign_cache(command, Paths(Path("/d"))) == Path("/c")
    assert daemon.foreign_cache("/usr/sbin/dockerd -H fd://", Paths(Path("/d"))) is None
    assert daemon.foreign_cache("less --config-file /c/state/docker/daemon.json", Paths(Path("/d"))) is None


def test_only_layers_out_of_use_are_pruned(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    for name, age in (("old", 20), ("new", 1)):
        folder = paths.store / "layers" / name
        folder.mkdir(parents=True)
        os.utime(folder, (1e9 - age * 86400, 1e9 - age * 86400))
    assert prune(paths, now=1e9) == ["old"]
    assert [each.name for each in (paths.store / "layers").iterdir()] == ["new"]


def test_cgroups_are_found_in_every_hierarchy_and_removed(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "glm52" / "node").mkdir(parents=True)
    (tmp_path / "memory" / "other").mkdir(parents=True)
    (tmp_path / "cpu" / "glm52" / "node" / "cgroup.procs").write_text("41\n42\n")
    assert processes.in_cgroup(root=tmp_path) == {41, 42}
    (tmp_path / "cpu" / "glm52" / "node" / "cgroup.procs").unlink()  # the kernel's own go with their folder
    processes.remove_cgroups(root=tmp_path)
    assert not (tmp_path / "cpu" / "glm52").exists()
    assert (tmp_path / "memory" / "other").exists()


def test_a_process_that_ignores_term_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        processes.end([stubborn.pid], patience=0.2)
        assert stubborn.wait(5) == -9


def test_a_number_that_is_someone_elses_by_now_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        processes.end([other.pid], patience=0.1, still_ours=lambda _: False)
        assert other.poll() is None
        other.kill()


def test_half_done_builds_are_swept(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    (paths.tmp / "kubernetes-1.77.part" / "deep").mkdir(parents=True)
    sweep(paths)
    assert list(paths.tmp.iterdir()) == []


def test_a_failed_build_leaves_no_target(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    try:
        with fresh(tmp_path / "bin" / "x", paths) as part:
            (part / "half").touch()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not (tmp_path / "bin" / "x").exists()
    assert list(paths.tmp.iterdir()) == []


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    write_atomically(tmp_path / "deep" / "file", "one", 0o600)
    write_atomically(tmp_path / "deep" / "file", "two", 0o600)
    assert (tmp_path / "deep" / "file").read_text() == "two"
    assert os.stat(tmp_path / "deep" / "file").st_mode & 0o777 == 0o600
    assert len(list((tmp_path / "deep").iterdir())) == 1


def test_digest_changes_with_names_and_content_but_not_with_bytecode(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    first = digest([tmp_path / "code"])
    (tmp_path / "code" / "__pycache__").mkdir()
    (tmp_path / "code" / "__pycache__" / "a.pyc").write_text("x")
    assert digest([tmp_path / "code"]) == first
    (tmp_path / "code" / "a.py").rename(tmp_path / "code" / "b.py")
    assert digest([tmp_path / "code"]) != first


def test_service_starts_are_forbidden_only_meanwhile_and_an_owners_rule_stands(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with debian.no_autostart(policy):
        assert os.access(policy, os.X_OK)
    assert not policy.exists()
    policy.write_text(debian.POLICY_TEXT)  # left by a run that was killed
    with debian.no_autostart(policy):
        pass
    assert not policy.exists()
    policy.write_text("#!/bin/sh\nexit 101\n")
    with debian.no_autostart(policy):
        pass
    assert policy.read_text() == "#!/bin/sh\nexit 101\n"
