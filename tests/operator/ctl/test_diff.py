"""What an apply would change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from glm52_operator import names
from glm52_operator.ctl.diff import ABSENT, LAST_APPLIED, compare, fields_of, report, three_way
from tests.operator.test_plan import json_values


def live(spec: dict[str, Any], last: Any = None) -> dict[str, Any]:
    annotations = {} if last is None else {LAST_APPLIED: last if isinstance(last, str) else json.dumps({"spec": last})}
    return {"metadata": {"annotations": annotations}, "spec": spec}


@pytest.mark.parametrize(
    ("there", "last", "written", "expected"),
    [
        pytest.param({"a": 1, "b": 2}, None, {"a": 3}, {"a": 3, "b": 2}, id="others' fields stay"),
        pytest.param({"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1}, {"a": 1}, id="taken out of the file"),
        pytest.param({"d": {"r": 5}}, {"d": {}}, {"d": {}}, {"d": {"r": 5}}, id="scaled"),
        pytest.param({"d": {"r": 5}}, {"d": {"r": 1}}, {"d": {"r": 1}}, {"d": {"r": 1}}, id="scale is reset"),
        pytest.param({"d": {"r": 5, "x": 1}}, {"d": {"x": 1}}, {"d": {}}, {"d": {"r": 5}}, id="taken out below"),
        pytest.param({"l": [1, 2]}, None, {"l": [3]}, {"l": [3]}, id="lists are replaced"),
        pytest.param({"a": 1}, "no JSON", {"b": 1}, {"a": 1, "b": 1}, id="annotation spoilt"),
    ],
)
def test_a_file_is_merged_as_kubectl_does(there: Any, last: Any, written: Any, expected: Any) -> None:
    assert three_way(live(there, last), {"spec": written}) == expected


def service(**changes: Any) -> dict[str, Any]:
    return {"kind": "Service", "metadata": {"name": "s", "labels": {"a": "b"}}, "spec": {"ports": [], **changes}}


def test_what_only_the_server_writes_is_no_change() -> None:
    before = service() | {"status": {"x": 1}}
    after = service()
    after["metadata"] |= {"managedFields": [1], "resourceVersion": "2", "generation": 3}
    assert compare(before, after) is None


def test_amounts_written_otherwise_are_no_change() -> None:
    def limited(size: str) -> dict[str, Any]:
        return service(limits={"memory": size})

    assert compare(limited("2048Mi"), limited("2Gi")) is None
    assert compare(limited("2Gi"), limited("3Gi")) is not None


def test_members_of_lists_are_paired_by_name_and_added_and_removed_ones_shown() -> None:
    before = service(ports=[{"name": "a", "port": 1}, {"name": "b", "port": 2}])
    after = service(ports=[{"name": "b", "port": 3}, {"name": "c", "port": 4}])
    change = compare(before, after)
    assert change is not None
    assert list(change.fields) == [
        ("spec.ports[a]", "{'name': 'a', 'port': 1}", ABSENT),
        ("spec.ports[b].port", "2", "3"),
        ("spec.ports[c]", ABSENT, "{'name': 'c', 'port': 4}"),
    ]


def test_a_change_is_one_printable_line() -> None:
    change = compare(service(x="a"), service(x="a\nb\x1b[31m"))
    assert change is not None
    assert report([change]) == "~ Service s\n    spec.x: a → a↵b�[31m"


@given(json_values, json_values)
def test_fields_differ_only_where_values_do(one: Any, other: Any) -> None:
    assert list(fields_of(one, one, "")) == []
    if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
        assert list(fields_of(one, other, "")) == []


def test_the_configuration_that_pods_carry_is_compared_field_by_field() -> None:
    def workload(config: str) -> dict[str, Any]:
        template = {"metadata": {"annotations": {names.CONFIG: config}}}
        return {"kind": "StatefulSet", "metadata": {"name": "s"}, "spec": {"template": template}}

    change = compare(workload('{"decode": {"seats": 1}, "x": 1}'), workload('{"decode": {"seats": 2}, "x": 1}'))
    assert change is not None
    assert list(change.fields) == [(f"spec.template.metadata.annotations.{names.CONFIG}.decode.seats", "1", "2")]
    assert change.rolls
    spoilt = compare(workload("no JSON"), workload("{}"))
    assert spoilt is not None
    assert [old for _, old, _ in spoilt.fields] == ["no JSON"]
