"""`make test`: every check and every test, one after the other, with times; the first failure does not hide the rest.

    python -m e2e.suite            everything, on a cluster it brings up
    python -m e2e.suite lint       ruff, mypy, import-linter, generated files, helm lint
    python -m e2e.suite unit       the tests of parts
    python -m e2e.suite engine     models and kernels that compute, and pods within the process
    python -m e2e.suite processes  whole engines as processes, without a cluster
    python -m e2e.suite integration  the operator on a control plane without nodes
    python -m e2e.suite e2e        the tests on the cluster
    python -m e2e.suite disruptive constant load on the cluster through all that is done to it; only when it is named

A layer that cannot run says so, and fails the run when CI is set: a green run that tested nothing is worse than a red
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
BIN = Path(PYTHON).parent

Layer = Callable[[], int]


def run(*command: str | Path) -> int:
    words = [str(word) for word in command]
    print(f"$ {' '.join(words)}", flush=True)
    return subprocess.run(words, cwd=ROOT, check=False).returncode


def first_failure(codes: Sequence[int]) -> int:
    return next((code for code in codes if code), 0)


def lint() -> int:
    if (ROOT / "operator/__init__.py").exists():
        print("operator/__init__.py would shadow the standard library's operator module; delete it", file=sys.stderr)
        return 1
    return first_failure(
        [
            run(BIN / "ruff", "check", "."),
            run(BIN / "ruff", "format", "--check", "."),
            run(BIN / "mypy", "engine/glm52_engine", "operator/glm52_operator", "e2e", "tools"),
            run(BIN / "lint-imports", "--no-cache"),
            run(PYTHON, "-m", "glm52_operator", "crd", "--check"),
        ]
    )


def pytest(markers: str, *more: str) -> int:
    # With -n, a file goes to one worker (conftest.py), so that what is costly is made once.
    return run(PYTHON, "-m", "pytest", "-q", "tests", "-m", markers, *more)


def unit() -> int:
    return pytest("not cluster and not processes and not engine and not integration", "-n", "2")


def engine() -> int:
    return pytest("engine and not cluster and not processes", "-n", "2")


def processes() -> int:
    return pytest("processes")


def integration() -> int:
    # Each worker has a control plane of its own; most of a test is waiting for what shall not happen.
    return pytest("integration", "--durations=10", "-n", "2")


def cluster() -> int:
    return run(PYTHON, "-m", "e2e.cluster", "up", "--no-example")


def e2e() -> int:
    # Most of a cluster test is waiting for the kubelet: two at a time, each file in namespaces of its own.
    return with_logs(pytest("cluster and not disruptive", "e2e", "--durations=15", "-n", "2"))


def disruptive() -> int:
    # -s: how many requests there were in each part, and how long it was until all was well again.
    return with_logs(pytest("disruptive", "e2e", "--durations=15", "-s"))


def with_logs(code: int) -> int:
    if code:
        logs = ROOT / "build/cluster-logs"
        run(PYTHON, "-m", "e2e.cluster", "logs", logs)
        print(f"logs of every node and pod: {logs}", flush=True)
    return code


ALONE = {"disruptive"}
"""Layers that run when they are named: a quarter of an hour of constant load, during which nothing else may use the
cluster."""


def layers(names: Sequence[str]) -> list[tuple[str, Layer]]:
    every: dict[str, Layer] = {
        "lint": lint,
        "unit": unit,
        "engine": engine,
        "processes": processes,
        "integration": integration,
        "cluster": cluster,
        "e2e": e2e,
        "disruptive": disruptive,
    }
    unknown = sorted(set(names) - set(every))
    if unknown:
        raise SystemExit(f"no layer {', '.join(unknown)}; there are {', '.join(every)}")
    return [(name, layer) for name, layer in every.items() if (name in names if names else name not in ALONE)]


class Aside:
    """The lint layer in a process of its own, beside a layer that keeps one core busy; its words come at the end."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [PYTHON, "-m", "e2e.suite", "lint"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._words: list[str] = []
        # Read as they come: a pipe that is full would stop the layer.
        self._reader = threading.Thread(target=lambda: self._words.extend(self._process.stdout or ()))
        self._reader.start()

    def result(self) -> tuple[str, int, float]:
        code = self._process.wait()
        self._reader.join()
        print(f"\n=== lint, beside the layer before\n{''.join(self._words)}", flush=True)
        return "lint", code, time.monotonic() - self._began


def main(names: Sequence[str]) -> int:
    results: list[tuple[str, int, float]] = []
    chosen = layers(names)
    aside = {"lint", "processes"} <= {name for name, _ in chosen}
    for name, layer in chosen:
        if name == "lint" and aside:
            continue
        print(f"\n=== {name}", flush=True)
        if name == "e2e" and any(n == "cluster" and code for n, code, _ in results):
            print("SKIPPED: no cluster came up, so nothing was tested on one", flush=True)
            results.append((name, 1 if os.environ.get("CI") else 0, 0.0))
            continue
        lint_run = Aside() if name == "processes" and aside else None
        began = time.monotonic()
        results.append((name, layer(), time.monotonic() - began))
        if lint_run is not None:
            results.append(lint_run.result())
    print("\n=== summary")
    for name, code, seconds in results:
        print(f"  {name:<11} {'ok' if code == 0 else f'FAILED ({code})':<14} {seconds:7.1f} s")
    return first_failure([code for _, code, _ in results])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
