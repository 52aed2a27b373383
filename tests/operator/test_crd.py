"""The generated CRD: structural rules, descriptions, defaults, and the committed files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm52_operator.api import docs
from glm52_operator.api.crd import crd, render
from glm52_operator.api.spec import Spec
from glm52_operator.cli.crd import FILES
from glm52_operator.cli.main import main

ROOT = Path(__file__).parents[2]
SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for key, value in schema.get("properties", {}).items():
        yield from nodes(value, f"{path}.{key}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


ALL = dict(nodes(SCHEMA))


@pytest.mark.parametrize("path", sorted(ALL.keys() - {".metadata"}))
def test_every_field_has_a_description_and_a_type(path: str) -> None:
    assert ALL[path].get("description", "").endswith("."), path or "root"
    assert "type" in ALL[path]


@pytest.mark.parametrize("path", ALL)
def test_nothing_stands_in_the_schema_that_apiextensions_refuses(path: str) -> None:
    refused = {
        "$ref",
        "$defs",
        "title",
        "const",
        "anyOf",
        "oneOf",
        "additionalProperties",
        "discriminator",
        "uniqueItems",
    }
    assert not refused & ALL[path].keys()
    assert ALL[path].get("default", ...) is not None


@pytest.mark.parametrize("path", [path for path, node in ALL.items() if "x-kubernetes-validations" in node])
def test_every_rule_explains_itself(path: str) -> None:
    for rule in ALL[path]["x-kubernetes-validations"]:
        assert ":" in rule["message"] or " must " in rule["message"]
        assert len(rule["message"]) > 40


def test_strings_and_lists_that_users_write_are_bounded() -> None:
    for path, node in ALL.items():
        if path.startswith(".spec") and node["type"] == "string":
            assert "maxLength" in node or "enum" in node, path
        if node["type"] == "array":
            assert "maxItems" in node, path


def test_counts_are_integers() -> None:
    assert not [path for path, node in ALL.items() if node["type"] == "number"]


def test_decode_replicas_always_exist_for_the_scale_subresource() -> None:
    decode = ALL[".spec.decode"]
    assert decode["default"] == {}
    assert decode["properties"]["replicas"]["default"] == 1
    scale = crd()["spec"]["versions"][0]["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.decode.replicas"


def defaulted(schema: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """What the API server makes of a value."""
    result = dict(value)
    for key, node in schema.get("properties", {}).items():
        if key not in result and "default" in node:
            result[key] = node["default"]
        if isinstance(result.get(key), dict):
            result[key] = defaulted(node, result[key])
    return result


def test_the_server_and_the_models_fill_the_same_defaults() -> None:
    given = {"model": {"preset": "tiny"}}
    ours = Spec.model_validate(given).model_dump(by_alias=True, exclude_none=True)
    assert defaulted(SCHEMA["properties"]["spec"], given) == ours


def test_printer_columns_name_fields_that_exist() -> None:
    for column in crd()["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = column["jsonPath"].split("[")[0]
        assert path in ALL or path == ".metadata.creationTimestamp", column


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_committed_files_are_current(path: Path) -> None:
    assert (ROOT / path).read_text() == FILES[path]()


def test_the_page_tells_of_every_field_and_rule() -> None:
    page = docs.render()
    fields = {path for path in ALL if path.startswith((".spec.", ".status."))}
    assert [path for path in sorted(fields) if not path.endswith("[]") and f"`{path[1:]}`" not in page] == []
    assert all(rule["message"] in page for node in ALL.values() for rule in node.get("x-kubernetes-validations", []))


def test_check_fails_on_a_stale_file_and_writing_repairs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["crd", "--root", str(tmp_path)]
    assert main([*arguments, "--check"]) == 1
    crd_file, chart_file, _ = FILES
    assert str(crd_file) in capsys.readouterr().err
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    assert yaml.safe_load((tmp_path / crd_file).read_text()) == crd()
    (tmp_path / chart_file).write_text(render() + " ")
    assert main([*arguments, "--check"]) == 1
