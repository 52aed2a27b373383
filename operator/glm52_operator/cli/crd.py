"""Write or check what is generated from the models: the CRD, the chart's copy of it, and its page in docs/."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from glm52_operator.api import crd, docs

FILES: dict[Path, Callable[[], str]] = {
    Path("crds/glm52deployments.yaml"): crd.render,
    # A copy and no link: packaging a chart does not follow links out of it.
    Path("charts/glm52-operator/files/glm52deployments.yaml"): crd.render,
    Path("docs/api.md"): docs.render,
}


def run(root: Path, *, check: bool) -> int:
    wanted = {path: render().encode() for path, render in FILES.items()}
    wrong = [path for path, text in wanted.items() if not _same(root / path, text)]
    if check:
        for path in wrong:
            print(f"{path} is not what the models say: run `glm52-operator crd`", file=sys.stderr)
        return 1 if wrong else 0
    for path in wrong:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(wanted[path])
        print(f"wrote {path}")
    return 0


def _same(path: Path, wanted: bytes) -> bool:
    return path.exists() and path.read_bytes() == wanted
