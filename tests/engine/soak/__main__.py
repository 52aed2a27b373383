"""The long form: python -m tests.engine.soak [--seconds 600] [--seed 1]

Starts `glm52-engine local` on a tiny checkpoint, prints progress and a JSON report; exit code 1 when anything
leaked, an answer was wrong or a probe's output changed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from glm52_engine.checkpoint import make_checkpoint
from tests.engine.local.running import Running
from tests.engine.soak.soak import soak

REST_SECONDS = 40.0
"""Longer than the router keeps an idle connection."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint("tiny", Path(folder) / "tiny")
        running = Running("--model", f"{folder}/tiny")
        try:
            running.says("Ctrl-C ends everything")
            report = asyncio.run(soak(running, options.seconds, seed=options.seed, say=print, rest=REST_SECONDS))
        finally:
            code = running.end()
    print(json.dumps(report.as_dict(), indent=1))
    failures = [*report.failures(), *([f"glm52-engine local ended with {code}"] if code else [])]
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
