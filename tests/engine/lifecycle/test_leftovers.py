from __future__ import annotations

from pathlib import Path

import pytest

from glm52_engine.lifecycle.leftovers import is_first_process, sweep


def test_segments_of_a_former_run_go_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "nccl-abc").write_bytes(b"x" * 100)
    (tmp_path / "ucx_shm_posix_1").write_bytes(b"x" * 20)
    (tmp_path / "somebodys").write_bytes(b"x")
    (tmp_path / "torch_dir").mkdir()
    assert sweep(tmp_path) == 120
    assert sorted(file.name for file in tmp_path.iterdir()) == ["somebodys", "torch_dir"]
    assert sweep(tmp_path) == 0


def test_where_there_is_no_shared_memory_nothing_happens(tmp_path: Path) -> None:
    assert sweep(tmp_path / "none") == 0


def test_on_a_machine_that_is_shared_nothing_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "p")
    assert not is_first_process()
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert is_first_process()
    # As in a container that shares the host's memory.
    monkeypatch.delenv("POD_NAME")
    assert not is_first_process()
