"""What an apply of a file would change: fields as they are, and as they would be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from glm52_operator import names
from glm52_operator.ctl.text import clean
from glm52_operator.desired.target import Object
from glm52_operator.plan.changes import difference
from glm52_operator.plan.resolve import shown

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
ABSENT = "(absent)"

_SERVER_OWNED = ("managedFields", "resourceVersion", "generation", "uid", "creationTimestamp", "selfLink")
_KEYS = ("mountPath", "uid", "name", "topologyKey", "ip", "type")


@dataclass(frozen=True, slots=True)
class Change:
    """One object that an apply would make or alter."""

    kind: str
    name: str
    fields: Sequence[tuple[str, str, str]]
    """Path, value now, value then."""
    new: bool = False
    gone: bool = False
    rolls: bool = False
    """Its pods are replaced."""


def three_way(live: Object, written: Object) -> Object:
    """The specification that `kubectl apply` of a file would leave: the file's fields win, fields that were in the file
    applied last and are no longer are removed, and what others set (a scaled replica count) stays."""
    return _merge(live.get("spec", {}), _last_applied(live), written["spec"])  # type: ignore[no-any-return]


def _last_applied(live: Object) -> Any:
    text = live.get("metadata", {}).get("annotations", {}).get(LAST_APPLIED)
    try:
        return json.loads(text)["spec"] if text else {}
    except (ValueError, KeyError, TypeError):
        return {}


def _merge(live: Any, last: Any, new: Any) -> Any:
    if not isinstance(new, dict) or not isinstance(live, dict):
        return new
    before = last if isinstance(last, dict) else {}
    kept = {key: value for key, value in live.items() if key in new or key not in before}
    merged = {key: _merge(live.get(key), before.get(key), value) for key, value in new.items()}
    return {**kept, **merged}


def compare(before: Object | None, after: Object) -> Change | None:
    """An object as it is, and as a dry run says that it would be; None where nothing changes."""
    kind, name = after["kind"], after["metadata"]["name"]
    if before is None:
        return Change(kind, name, (), new=True)
    fields = [
        (path, _value(old), _value(new))
        for path, old, new in fields_of(_own(before), _own(after), "")
        if not path.endswith((names.APPLIED_HASH, names.KV))
    ]
    if not fields:
        return None
    rolls = any(path.startswith("spec.template.") for path, _, _ in fields)
    return Change(kind, name, fields, rolls=rolls)


def _own(obj: Object) -> Object:
    meta = {key: value for key, value in obj.get("metadata", {}).items() if key not in _SERVER_OWNED}
    return {**{key: value for key, value in obj.items() if key != "status"}, "metadata": meta}


_NOTHING = object()


def fields_of(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ; members of lists are paired by their name where they have one."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{path}.{key}" if path else key
            yield from fields_of(old.get(key, _NOTHING), new.get(key, _NOTHING), inner)
    elif isinstance(old, list) and isinstance(new, list):
        yield from _list_fields(old, new, path)
    elif path.endswith(names.CONFIG) and (before := _parsed(old)) and (after := _parsed(new)):
        yield from fields_of(before, after, path)
    elif _differs(old, new, path):
        yield path, old, new


def _parsed(text: Any) -> Object | None:
    """The configuration that a pod carries; None where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _differs(old: Any, new: Any, path: str) -> bool:
    if old is _NOTHING or new is _NOTHING:
        return old is not new
    # The operator's own comparison knows that 2048Mi and 2Gi are the same amount; it is asked by the path's last parts.
    nested_new, nested_old = new, old
    for part in reversed(path.split(".")[-2:]):
        nested_new, nested_old = {part: nested_new}, {part: nested_old}
    return difference(nested_new, nested_old) is not None


def _list_fields(old: list[Any], new: list[Any], path: str) -> Iterator[tuple[str, Any, Any]]:
    key = next(
        (key for key in _KEYS if all(isinstance(i, dict) and isinstance(i.get(key), str) for i in old + new)), None
    )
    if key is None or len({i[key] for i in old}) < len(old) or len({i[key] for i in new}) < len(new):
        for number in range(max(len(old), len(new))):
            pair = [items[number] if number < len(items) else _NOTHING for items in (old, new)]
            yield from fields_of(pair[0], pair[1], f"{path}[{number}]")
        return
    before, after = {i[key]: i for i in old}, {i[key]: i for i in new}
    for name in [*before, *(name for name in after if name not in before)]:
        yield from fields_of(before.get(name, _NOTHING), after.get(name, _NOTHING), f"{path}[{name}]")


def _value(value: Any) -> str:
    return ABSENT if value is _NOTHING else value if isinstance(value, str) and len(value) < 60 else shown(value)


def report(changes: Sequence[Change]) -> str:
    """The changes as text; says so where there are none."""
    if not changes:
        return "Nothing would change."
    lines = []
    for change in changes:
        word = "+" if change.new else "-" if change.gone else "~"
        tail = "  (its pods are replaced)" if change.rolls else ""
        lines.append(f"{word} {change.kind} {change.name}{tail}")
        lines += [f"    {path}: {_line(old)} → {_line(new)}" for path, old, new in change.fields]
    return "\n".join(lines)


def _line(text: str) -> str:
    return clean(text.replace("\n", "↵"))
