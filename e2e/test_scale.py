"""The scale subresource; scaling itself is tested under load, in test_traffic.py."""

from __future__ import annotations

import pytest

from e2e.kube import Kubectl

pytestmark = pytest.mark.cluster


def test_scale_reads_back_what_an_autoscaler_needs(chat: Kubectl) -> None:
    scale = chat("get", "--raw", f"/apis/glm52.dev/v1alpha1/namespaces/{chat.namespace}/glm52deployments/chat/scale")
    assert '"replicas":1' in scale.stdout
    assert "glm52.dev/role=decode" in scale.stdout
