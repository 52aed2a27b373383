"""A deployment from its first apply to its end."""

from __future__ import annotations

from e2e.controlplane.operator import Process
from e2e.controlplane.space import Space, deployment


def test_a_deployment_becomes_ready_scales_and_goes(space: Space, operator: Process) -> None:
    space.apply(deployment("chat"))
    space.until_ready("chat")
    generation = space.edit("chat", decode={"replicas": 3})["metadata"]["generation"]
    space.until_ready("chat", generation)
    assert set(space.pods("chat", "decode")) == {"chat-decode-0", "chat-decode-1", "chat-decode-2"}
    space.delete("GLM52Deployment", "chat")
    space.until("nothing of it is left", lambda: not space.children("chat") and not space.pods("chat"))
