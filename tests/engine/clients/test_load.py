"""guidellm, as people measure servers with it: a few seconds of load, every request answered and counted right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from tests.engine.clients.overlay import overlay

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
REQUESTS = 8


@pytest.fixture(scope="session")
def guidellm() -> Path:
    try:
        return overlay(ROOT / "requirements/load.lock", ROOT / "build/load")
    except subprocess.CalledProcessError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"guidellm cannot be installed here: {error}")


def successes(server: str) -> float:
    text = requests.get(f"{server}/metrics", timeout=10).text
    name = 'glm52_router_requests_total{endpoint="chat",status="200"} '
    return next((float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)), 0.0)


def test_a_benchmark_of_a_few_seconds(server: str, guidellm: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    before, report = successes(server), tmp_path / "report.json"
    command = [
        *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={server},model=glm-5.2"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tiny_checkpoint}"),
        *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
        *("--output", f"kind=json,path={report}"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(guidellm), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    deadline = time.monotonic() + 20  # the last answer is counted a moment after the client has it
    while successes(server) < before + REQUESTS and time.monotonic() < deadline:
        time.sleep(0.05)
    assert successes(server) >= before + REQUESTS
    output = benchmark["metrics"]["output_token_count"]["successful"]
    assert output["mean"] == 8
