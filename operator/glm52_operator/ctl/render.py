"""The children of a deployment as YAML, in an order that kubectl can apply."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from glm52_operator import names
from glm52_operator.desired.children import build
from glm52_operator.desired.secret import TOKEN_KEY
from glm52_operator.desired.target import Object, Target


class _Dumper(yaml.SafeDumper):
    """Blocks of several lines stay readable; nothing is an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def render(targets: Sequence[Target]) -> str:
    """Every child but the Secret, whose token is random; without their owner, whose uid only the cluster knows."""
    return "".join(_one(target) for target in targets)


def _one(target: Target) -> str:
    secret = names.internal_secret(target.name)
    head = (
        f"# Children of {names.KIND} {target.name}. The operator also makes the Secret {secret}; without it:\n"
        f"#   kubectl -n {target.namespace} create secret generic {secret} "
        f'--from-literal={TOKEN_KEY}="$(openssl rand -hex 32)"\n'
    )
    documents = [_without_owner(child) for child in build(target)]
    body = "---\n".join(yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120) for document in documents)
    return f"---\n{head}{body}"


def _without_owner(child: Object) -> Object:
    meta = {key: value for key, value in child["metadata"].items() if key != "ownerReferences"}
    return {**child, "metadata": meta}
