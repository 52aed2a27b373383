"""Write or check the generated CRD and the chart's copy of it."""

from __future__ import annotations

import sys
from pathlib import Path

from glm52_operator.api.crd import render

FILES = (Path("crds/glm52deployments.yaml"), Path("charts/glm52-operator/files/glm52deployments.yaml"))
"""The chart has a copy and no link: packaging a chart does not follow links out of it."""


def run(root: Path, *, check: bool) -> int:
    wanted = render().encode()
    wrong = [path for path in FILES if not _same(root / path, wanted)]
    if check:
        for path in wrong:
            print(f"{path} is not what the models say: run `glm52-operator crd`", file=sys.stderr)
        return 1 if wrong else 0
    for path in wrong:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(wanted)
        print(f"wrote {path}")
    return 0


def _same(path: Path, wanted: bytes) -> bool:
    return path.exists() and path.read_bytes() == wanted
