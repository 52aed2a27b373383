"""What docs/install.md tells people to apply by themselves."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from glm52_engine.config import API_PORT, STORE_HEALTH_PORT
from glm52_operator import names
from glm52_operator.desired.children import build
from tests.operator.builders import target

TEXT = (Path(__file__).parents[2] / "docs/install.md").read_text()


def test_the_network_policy_is_about_all_pods_of_a_deployment_and_leaves_their_http_ports_open() -> None:
    found = re.search(r"```yaml\n(.*?)```", TEXT[TEXT.index("## Keep others away from KV") :], re.DOTALL)
    assert found is not None
    policy = yaml.safe_load(found.group(1))
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert chosen == {names.NAME: "NAME"}
    inside, outside = policy["spec"]["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": chosen}}]}
    children = build(target(kvCacheOffload={"roles": ["prefill"], "storeGiB": 1}))
    pods = [child["spec"]["template"] for child in children if "template" in child.get("spec", {})]
    assert len(pods) == 4
    for pod in pods:
        assert pod["metadata"]["labels"][names.NAME] == "chat"
        probed = {
            each["containerPort"] for c in pod["spec"]["containers"] for each in c["ports"] if each["name"] == "http"
        }
        assert probed <= {each["port"] for each in outside["ports"]} == {API_PORT, STORE_HEALTH_PORT}
