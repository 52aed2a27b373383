"""The checks that the API server makes at apply, without one: the schema, and the rules over several fields."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from pydantic import ValidationError

from glm52_engine.config import MODEL_MOUNT
from glm52_operator import names
from glm52_operator.api.crd import Schema, structural
from glm52_operator.api.models import GLM52Deployment
from glm52_operator.ctl.errors import CtlError
from glm52_operator.ctl.manifest import Manifest
from glm52_operator.desired.target import Object, Target
from glm52_operator.plan.resolve import Invalid, explain, resolve, shown

_RULES = "x-kubernetes-validations"
_NOT_SPEC = ("apiVersion", "kind", "metadata", "status")


def problems(resource: Object) -> list[str]:
    """Everything that an apply would be refused for: path, expectation, what was found, remedy."""
    body = {key: value for key, value in resource.items() if key not in _NOT_SPEC}
    try:
        # As JSON, strictly: the API server takes no "1" for 1, and pydantic would.
        model = GLM52Deployment.model_validate_json(json.dumps(body), strict=True)
    except ValidationError as error:
        return explain(error)
    filled = model.model_dump(by_alias=True, exclude_none=True, mode="json")
    return list(_broken(_schema(), {**filled, "metadata": resource["metadata"]}, ""))


def target(manifest: Manifest, namespace: str, image: str | None) -> Target:
    """The deployment as the operator would read it; raises CtlError where it could not."""
    meta = {"uid": "", **manifest.resource["metadata"], "namespace": namespace}
    found = resolve({**manifest.resource, "metadata": meta}, image)
    if isinstance(found, Invalid):
        raise CtlError(f"{manifest.title}: {found.message}")
    return found


@cache
def _schema() -> Schema:
    return structural(GLM52Deployment)


def rules() -> list[str]:
    """The text of every rule of the schema."""
    return [rule["rule"] for node in _nodes(_schema()) for rule in node.get(_RULES, [])]


def _nodes(schema: Schema) -> Iterator[Schema]:
    yield schema
    for inner in schema.get("properties", {}).values():
        yield from _nodes(inner)


def _broken(schema: Schema, value: Any, path: str) -> Iterator[str]:
    for rule in schema.get(_RULES, []):
        holds = TWINS.get(rule["rule"])
        if holds is not None and not holds(value):
            where = f"{path}{rule.get('fieldPath', '')}".lstrip(".")
            found = value.get(rule["fieldPath"][1:]) if "fieldPath" in rule else value
            told = f" (found {shown(found)})" if where else f" (found {shown(value['metadata']['name'])})"
            yield f"{where}{': ' if where else ''}{rule['message']}{told}. Correct it and apply again"
    for key, inner in schema.get("properties", {}).items():
        if key in value and "properties" in inner:
            yield from _broken(inner, value[key], f"{path}.{key}")


def _path_is_mounted(model: Any) -> bool:
    path = model.get("path")
    mounted = path is None or path == MODEL_MOUNT or path.startswith(f"{MODEL_MOUNT}/")
    return mounted and ".." not in (path or "").split("/")


def _shares_prefixes(spec: Any) -> bool:
    return "kvCacheOffload" not in spec or spec.get("prefill", {}).get("prefixCache", True)


def _has_one_host(spec: Any) -> bool:
    return "kvCacheOffload" not in spec or spec.get("prefill", {}).get("hostsPerReplica", 1) == 1


def _decode_has_one_host(spec: Any) -> bool:
    saves = "decode" in spec.get("kvCacheOffload", {}).get("roles", [])
    return not saves or spec.get("decode", {}).get("hostsPerReplica", 1) == 1


TWINS: dict[str, Callable[[Any], bool]] = {
    "has(self.preset) != has(self.path)": lambda model: ("preset" in model) != ("path" in model),
    "has(self.path) == has(self.volume)": lambda model: ("path" in model) == ("volume" in model),
    f"!has(self.path) || ((self.path == '{MODEL_MOUNT}' || self.path.startsWith('{MODEL_MOUNT}/'))"
    " && !self.path.split('/').exists(part, part == '..'))": _path_is_mounted,
    "!has(self.nodePort) || self.type != 'ClusterIP'": lambda service: (
        "nodePort" not in service or service["type"] != "ClusterIP"
    ),
    "!has(self.backoffBaseSeconds) || !has(self.backoffMaxSeconds)"
    " || self.backoffBaseSeconds <= self.backoffMaxSeconds": lambda policy: (
        policy.get("backoffBaseSeconds", 0) <= policy.get("backoffMaxSeconds", math.inf)
    ),
    "!has(self.kvCacheOffload) || !has(self.prefill) || !has(self.prefill.prefixCache)"
    " || self.prefill.prefixCache": _shares_prefixes,
    "!has(self.kvCacheOffload) || !has(self.prefill) || !has(self.prefill.hostsPerReplica)"
    " || self.prefill.hostsPerReplica == 1": _has_one_host,
    "!has(self.kvCacheOffload) || !('decode' in self.kvCacheOffload.roles) || !has(self.decode)"
    " || !has(self.decode.hostsPerReplica) || self.decode.hostsPerReplica == 1": _decode_has_one_host,
    "'prefill' in self.roles": lambda store: "prefill" in store.get("roles", []),
    f"self.metadata.name.size() <= {names.MAX_NAME}": lambda top: len(top["metadata"]["name"]) <= names.MAX_NAME,
    "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')": lambda top: (
        re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", top["metadata"]["name"]) is not None
    ),
}
"""What each rule of the schema says, in Python: an evaluator of CEL would be a big dependency for a handful of lines.
A rule without a twin is left to the API server; a test says so."""
