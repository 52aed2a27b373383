"""docs/operations.md: no runbook that nobody has ever followed."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_runbook_is_gone_through_by_a_test_on_the_cluster() -> None:
    lines = (ROOT / "docs/operations.md").read_text().splitlines()
    headings = {line.removeprefix("## ") for line in lines if line.startswith("## ")}
    followed = {name for file in (ROOT / "e2e").glob("test_*.py") for name in marked(file)}
    assert followed == headings - {INDEX}


INDEX = "Where to look"


def marked(file: Path) -> set[str]:
    """The headings that the marker `runbook` names in a file."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    marks = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "runbook"]
    return {str(ast.literal_eval(argument)) for mark in marks for argument in mark.args}
