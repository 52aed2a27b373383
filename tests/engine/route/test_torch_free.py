from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = """
import sys
import glm52_engine.cli
import {module}
heavy = [name for name in {heavy} if name in sys.modules]
print(heavy)
"""


HEAVY = ("torch", "nixl_cu13", "transformers", "tokenizers", "fastapi", "opentelemetry", "uvicorn")


@pytest.mark.parametrize(
    "module",
    ["glm52_engine.route.process", "glm52_engine.lifecycle.ask_drain", "glm52_engine.local"],
    ids=["router", "drain", "local"],
)
def test_light_commands_import_nothing_heavy(module: str) -> None:
    out = subprocess.run(
        [sys.executable, "-c", LIGHT.format(module=module, heavy=HEAVY)], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
