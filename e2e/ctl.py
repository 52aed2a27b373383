"""glm52ctl as a person on call runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from e2e.kube import Kubectl


def glm52ctl(kube: Kubectl, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """In kubectl's namespace and on its cluster; the exit code is the caller's to judge."""
    where = ["-n", str(kube.namespace), "--kubeconfig", str(kube.kubeconfig)]
    command = [sys.executable, "-c", "from glm52_operator.ctl.main import main; raise SystemExit(main())"]
    words = [*command, *map(str, arguments), *where]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
