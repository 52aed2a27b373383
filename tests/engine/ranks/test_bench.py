"""The benchmark of experts on several ranks, in its size for a test: it runs, and all of its cases say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.ranks.processes import ROOT


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_every_case_gives_the_tokens_of_one_rank(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "engine")))}
    command = [sys.executable, "-m", "tests.engine.ranks.interpreted", "{}", "bench.experts", "--tiny"]
    run = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads((tmp_path / "experts.json").read_text())
    rows = {row["case"]: row for row in result["rows"]}
    assert list(rows) == ["alone", "one", "one -", "all", "all -"]
    assert rows["one"]["same_as_alone"] == rows["all"]["same_as_one"] == 1
    assert all(rows[name][figure] > 0 for name in ("one", "all") for figure in ("gather_us", "swap_us", "served_ms"))
    assert rows["alone"]["same_again"] == rows["one"]["same_again"] == rows["all"]["same_again"] == 1
    assert [entry["name"] for entry in result["reach"]] == [
        "the same tokens again, alone, 2 rows",
        "an exchange with nobody, 2 rows",
        "the same tokens again, one, 2 rows",
        "the same tokens again, all, 2 rows",
        "the tokens of one rank, 2 rows",
    ]
