"""Decode scales while requests stream, and none of them fails."""

from __future__ import annotations

import pytest

from e2e.kube import Kubectl, total, until, wait_ready
from e2e.traffic import Traffic

pytestmark = pytest.mark.cluster


def decode_pods(chat: Kubectl) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in chat.list("pods", "glm52.dev/name=chat,glm52.dev/role=decode"))


def generated(chat: Kubectl, pod: str) -> float:
    return total(chat.metrics(pod), "vllm:generation_tokens_total")


def test_decode_scales_up_and_down_under_load(chat: Kubectl, chat_url: str) -> None:
    with Traffic(chat_url) as traffic:
        traffic.wait_for_more(6)
        traffic.mark("1 → 2")
        chat("scale", "glm52", "chat", "--replicas=2")
        wait_ready(chat, "chat")
        assert decode_pods(chat) == ["chat-decode-0", "chat-decode-1"]
        until("the new pod generates", lambda: generated(chat, "chat-decode-1") > 0, timeout=60)
        traffic.wait_for_more(6)

        traffic.mark("2 → 1")
        chat("scale", "glm52", "chat", "--replicas=1")
        until("the pod is gone", lambda: decode_pods(chat) == ["chat-decode-0"], timeout=120)
        wait_ready(chat, "chat")
        traffic.mark("1 again")
        traffic.wait_for_more(6)
    assert traffic.failures() == []
    assert len(traffic.answers) >= 18


def test_scale_reads_back_what_an_autoscaler_needs(chat: Kubectl) -> None:
    scale = chat("get", "--raw", f"/apis/glm52.dev/v1alpha1/namespaces/{chat.namespace}/glm52deployments/chat/scale")
    assert '"replicas":1' in scale.stdout
    assert "glm52.dev/role=decode" in scale.stdout
