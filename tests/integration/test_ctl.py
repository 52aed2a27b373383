"""glm52ctl against a true API server: what it foretells is what the operator then does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.controlplane.client import Object
from e2e.controlplane.operator import Process
from e2e.controlplane.plane import ADMIN, ControlPlane
from e2e.controlplane.space import Space, deployment
from e2e.controlplane.standin import Exit, Kubelets
from glm52_operator.ctl.main import main

SIZES: dict[str, Any] = {"image": "engine:1", "decode": {"replicas": 2}}


def revisions(space: Space) -> dict[str, Object]:
    """What pods are made of, by workload."""
    return {
        name: obj["spec"]["template"]
        for name, obj in space.children("chat").items()
        if "template" in obj.get("spec", {})
    }


def test_a_plan_foretells_what_the_operator_does_and_writes_nothing(
    space: Space,
    operator: Process,
    kubelets: Kubelets,
    plane: ControlPlane,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kubeconfig = plane.kubeconfig(tmp_path / "kubeconfig", plane.tokens[ADMIN], namespace=space.name)

    def ctl(*arguments: str) -> tuple[int, str]:
        code = main([*arguments, "-n", space.name, "--kubeconfig", str(kubeconfig)])
        return code, capsys.readouterr().out

    def plan(**spec: Any) -> str:
        file = tmp_path / "chat.json"
        file.write_text(json.dumps(deployment("chat", **SIZES | spec)))
        code, told = ctl("plan", "-f", str(file), "--diff")
        assert code == 0
        return told

    space.apply(deployment("chat", **SIZES))
    space.until_ready("chat")
    assert "Nothing would change." in plan()
    before, edit = revisions(space), {"decode": {"replicas": 3, "maxNumSeqs": 7}, "drain": {"windowSeconds": 9}}
    told = plan(**edit)
    assert space.condition("chat", "Ready")["status"] == "True"
    assert revisions(space) == before
    generation = space.edit("chat", **edit)["metadata"]["generation"]
    space.until_ready("chat", generation)
    replaced = {name.partition("/")[2] for name, made in revisions(space).items() if made != before[name]}
    foretold = {line.split()[2] for line in told.splitlines() if line.endswith("(its pods are replaced)")}
    assert replaced == foretold
    assert "Nothing would change." in plan(**edit)
    assert ctl("diagnose", "chat")[0] == 0
    assert "chat-decode-2" in ctl("status", "chat")[1]
    kubelets.crash(space.name, "chat-decode-2", Exit(137), restarts=False)
    space.until_condition("chat", "DecodeReady", status="False")
    code, told = ctl("diagnose", "chat")
    assert code == 1
    assert "chat-decode-2" in told
