"""The kernels are a GPU's, too: what Triton's interpreter runs need not compile, and it has no threads that race."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_kernels_compile_for_a_hopper_card_and_their_threads_wait_for_each_other(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.hisparse.compiled"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line.split("; ") for line in done.stdout.splitlines()]
    assert [(name, races) for name, _, *races in found] == [
        ("_begin", []),
        ("_begin_whole", []),
        ("_resolve", []),
        ("_gather", []),
        ("_copy_blocks", []),
        ("_write_back", []),
        ("_decide", []),
        ("_assign", []),
        ("_add_up", []),
        ("_sum_placed", []),
    ]
