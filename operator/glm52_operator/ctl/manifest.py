"""From a file of YAML documents to the GLM52Deployments in it, or to a refusal that says where and what."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from glm52_operator import names
from glm52_operator.ctl.errors import CtlError
from glm52_operator.desired.target import Object
from glm52_operator.plan.resolve import shown

MAX_BYTES = 3 << 20
"""What the API server takes as one request."""

MAX_VALUES = 20_000
MAX_DEPTH = 64

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


@dataclass(frozen=True, slots=True)
class Manifest:
    """One GLM52Deployment as written, without its nulls, and where it stands."""

    resource: Object
    where: str

    @property
    def title(self) -> str:
        """How a message begins that speaks about it."""
        return f"{self.where}, {names.KIND} {self.name}"

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    @property
    def namespace(self) -> str | None:
        found = self.resource["metadata"].get("namespace")
        return None if found is None else str(found)


@dataclass(slots=True)
class Documents:
    deployments: list[Manifest] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Objects of other kinds, which are left aside: `PersistentVolumeClaim glm-checkpoint`."""


class _Loader(yaml.SafeLoader):
    """YAML as the API server reads it: dates are text, and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key {shown(key.value)} stands twice in one mapping", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read(path: str) -> str:
    """The text of a file, or of stdin for `-`."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CtlError(
            f"{path}: cannot be read ({reason}); expected a file of YAML documents, or - for stdin"
        ) from None
    if len(data) > MAX_BYTES:
        raise CtlError(f"{path}: is longer than {MAX_BYTES} bytes, more than the API server takes; split it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CtlError(f"{path}: is not UTF-8 (byte {error.start}); expected a file of YAML documents") from None


def parse(text: str, source: str) -> Documents:
    """All GLM52Deployments of a text; raises CtlError with everything that is wrong."""
    found, wrong = Documents(), []
    for number, document in enumerate(_load(text, source), start=1):
        where = f"{source}, document {number}"
        fault = _fault(document)
        if fault is not None:
            wrong.append(f"{where}: {fault}")
            continue
        for item in _members(document):
            if item is None:
                continue
            problem = _take(item, where, found)
            if problem is not None:
                wrong.append(f"{where}: {problem}")
    if wrong:
        raise CtlError("\n".join(wrong))
    if not found.deployments:
        there = f"only {', '.join(found.others)}" if found.others else "no object at all"
        raise CtlError(f"{source}: holds {there}; expected a document of kind {names.KIND} ({names.API_VERSION})")
    return found


def _load(text: str, source: str) -> list[Any]:
    try:
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise CtlError(f"{source}: is not YAML: {line}{error.problem or error.context}. Correct it there") from None
    except RecursionError:
        raise CtlError(f"{source}: is nested too deeply; expected at most {MAX_DEPTH} levels") from None
    except Exception as error:
        # PyYAML's constructors raise whatever int(), float() or a dict do on a scalar that carries a wrong tag.
        raise CtlError(
            f"{source}: is not YAML: {str(error).splitlines()[0] if str(error) else 'a wrong tag'}"
        ) from None


def _fault(document: Any) -> str | None:
    """What of a document the API could not carry: YAML has keys, dates, sets and loops that JSON has not."""
    stack: list[tuple[str, Any, int]] = [("", document, 0)]
    for _ in range(MAX_VALUES):
        if not stack:
            return None
        path, value, depth = stack.pop()
        if depth > MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep, or an alias holds itself"
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str):
                    return f"{path or 'top level'}: the key {shown(key)} is no text; write it in quotes"
                stack.append((f"{path}.{key}" if path else key, inner, depth + 1))
        elif isinstance(value, list):
            stack += [(f"{path}[{n}]", inner, depth + 1) for n, inner in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            return f"{path or 'top level'}: {value} is no number that JSON has; expected a finite one"
        elif not isinstance(value, (str, int, float, type(None))):
            return (
                f"{path or 'top level'}: JSON has no {type(value).__name__}; write it as text, number, list or mapping"
            )
    return f"holds more than {MAX_VALUES} values, counting those that aliases repeat"


def _members(document: Any) -> Iterator[Any]:
    """The document, or the items of a v1 List."""
    if isinstance(document, dict) and document.get("kind") == "List" and isinstance(document.get("items"), list):
        yield from document["items"]
    else:
        yield document


def _take(item: Any, where: str, found: Documents) -> str | None:
    """Put an object where it belongs, or say why it cannot be one."""
    if not isinstance(item, dict):
        return f"is {shown(item)}; expected an object with apiVersion, kind and metadata"
    kind, version = item.get("kind"), item.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(version, str):
        missing = "apiVersion" if isinstance(kind, str) else "kind"
        return f"{missing}: must be set to text (found {shown(item.get(missing))}), for example {names.KIND}"
    meta = item.get("metadata")
    name = meta.get("name") if isinstance(meta, dict) else None
    if kind != names.KIND:
        found.others.append(f"{kind} {name}" if isinstance(name, str) else kind)
        return None
    if version != names.API_VERSION:
        return f"apiVersion: is {shown(version)}; expected {names.API_VERSION}"
    if not isinstance(meta, dict) or not isinstance(name, str) or not name:
        return f"metadata.name: must be set to text (found {shown(name)}); it names the deployment and its children"
    namespace = meta.get("namespace")
    if namespace is not None and not is_namespace(namespace):
        return f"metadata.namespace: {shown(namespace)} is no name of a namespace; expected lower case letters and '-'"
    same = [m.where for m in found.deployments if (m.name, m.namespace) == (name, namespace)]
    if same:
        return f"{names.KIND} {name} stands in {same[0]} already; remove one of them"
    resource = _without_nulls(item)
    if not isinstance(resource.get("spec"), dict):
        return (
            f"{names.KIND} {name}: spec: must be a mapping (found {shown(item.get('spec'))}); write at least spec.model"
        )
    found.deployments.append(Manifest(resource, where))
    return None


def is_namespace(value: object) -> bool:
    return isinstance(value, str) and _NAMESPACE.fullmatch(value) is not None


def _without_nulls(value: Any) -> Any:
    """`decode:` with every line below it commented out is a null, which the API server replaces by the default."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
