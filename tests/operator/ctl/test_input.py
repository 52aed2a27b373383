"""Files of every kind in, a plan or a refusal out; and the checks that an API server would make."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from glm52_operator import names
from glm52_operator.ctl import check
from glm52_operator.ctl.errors import CtlError
from glm52_operator.ctl.main import main
from glm52_operator.ctl.manifest import Manifest, parse
from glm52_operator.ctl.plan import describe
from glm52_operator.desired.children import build
from tests.integration.test_validation import ACCEPTED, REFUSED, deployment
from tests.operator.builders import target

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"
IMAGE = "registry.example/engine:1"

HEAD = f"apiVersion: {names.API_VERSION}\nkind: {names.KIND}\nmetadata: {{name: chat}}\n"
GOOD = f"{HEAD}spec: {{model: {{preset: tiny}}}}\n"


def golden(command: str, example: Path) -> Path:
    return GOLDEN / f"{example.stem}.{command}.txt"


def output(command: str, example: Path) -> str:
    """What a command prints for an example; for the golden files too."""
    stdout, sys.stdout = sys.stdout, io.StringIO()
    try:
        code = main([command, "-f", str(example.relative_to(ROOT)), "--engine-image", IMAGE])
        assert code == 0
        return sys.stdout.getvalue()
    finally:
        sys.stdout = stdout


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("GLM52_ENGINE_IMAGE", raising=False)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_plans_are_those_of_the_golden_files(example: Path) -> None:
    # Renew after reading the difference: python -m tests.operator.ctl.renew_golden
    assert output("plan", example) == golden("plan", example).read_text()


def test_the_rendered_example_is_that_of_the_golden_file() -> None:
    (example,) = (path for path in EXAMPLES if path.stem == "tiny")
    assert output("render", example) == golden("render", example).read_text()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_rendered_children_are_what_the_operator_applies_without_their_owner(example: Path) -> None:
    (written,) = parse(example.read_text(), example.name).deployments
    wanted = build(check.target(written, "default", IMAGE))
    for child in wanted:
        del child["metadata"]["ownerReferences"]
    assert list(yaml.safe_load_all(output("render", example))) == wanted


@given(st.integers(1, 64), st.integers(1, 65536), st.integers(1, 4096), st.integers(0, 86400))
def test_every_sum_of_a_plan_is_right(ranks: int, pool: int, weights: int, window: int) -> None:
    role = {"ranksPerHost": ranks, "hostPoolGiB": pool}
    text = describe(
        target(
            model={"preset": "tiny", "weightsGiB": weights}, prefill=role, decode=role, drain={"windowSeconds": window}
        ),
        "x",
    )
    sums = re.findall(r"([0-9.]+)(?: GiB)? = ([^=]+?)(?:  |$)", text, re.MULTILINE)
    assert len(sums) == 7
    for total, terms in sums:
        factors = [re.findall(r"[0-9.]+", term) for term in terms.split(" + ")]
        assert float(total) == sum(math.prod(map(float, each)) for each in factors)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert all(line.startswith("glm52ctl: ") for line in err.splitlines())
    return err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", ["no object at all", names.KIND], id="empty"),
        pytest.param("---\n---\n# nothing\n", ["no object at all"], id="only marks"),
        pytest.param("a: [1,\nb", ["line 2", "not YAML"], id="bad YAML"),
        pytest.param("a: 1\na: 2\n", ["'a' stands twice", "line 2"], id="key twice"),
        pytest.param("just text", ["document 1", "'just text'", "expected an object"], id="text"),
        pytest.param("- 1\n", ["document 1", "expected an object"], id="list"),
        pytest.param("kind: X\n", ["apiVersion: must be set"], id="no apiVersion"),
        pytest.param("kind: [X]\napiVersion: v1\n", ["kind: must be set", "['X']"], id="kind no text"),
        pytest.param("kind: Pod\napiVersion: v1\nmetadata: {name: p}\n", ["only Pod p", names.KIND], id="other kind"),
        pytest.param(GOOD.replace("v1alpha1", "v9"), ["glm52.dev/v9", names.API_VERSION], id="other version"),
        pytest.param(GOOD.replace("name: chat", "x: 1"), ["metadata.name"], id="no name"),
        pytest.param(GOOD.replace("name: chat", "name: 7"), ["metadata.name", "found 7"], id="name no text"),
        pytest.param(GOOD.replace("name: chat", "name: chat, namespace: A_B"), ["metadata.namespace"], id="namespace"),
        pytest.param(HEAD, ["spec: must be a mapping", "spec.model"], id="no spec"),
        pytest.param(HEAD + "spec: 3\n", ["spec: must be a mapping", "found 3"], id="spec no mapping"),
        pytest.param(GOOD + "sepc: {}\n", ["sepc"], id="unknown at the top"),
        pytest.param(GOOD + "---\n" + GOOD, ["stands in", "document 1"], id="one object twice"),
        pytest.param("&a [*a]", ["an alias holds itself"], id="loop"),
        pytest.param(
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{chr(98 + n)}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)),
            ["aliases repeat"],
            id="aliases of aliases",
        ),
        pytest.param("[" * 1100, ["nested too deeply"], id="deep"),
        pytest.param("a: !!set {x}\n", ["a: JSON has no set"], id="set"),
        pytest.param("a: !!int x\n", ["not YAML"], id="wrong tag"),
        pytest.param("a: !!python/object:os.system {}\n", ["not YAML", "line 1"], id="python"),
        pytest.param("a: .nan\n", ["a: nan is no number"], id="not a number"),
        pytest.param("1: 2\n", ["the key 1 is no text"], id="key no text"),
        pytest.param("a: \x07\n", ["not YAML"], id="control character"),
    ],
)
def test_what_is_no_deployment_is_refused_in_words(
    text: str, says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    err = refused(capsys, "plan", "-f", str(file))
    for part in ["x.yaml", *says]:
        assert part in err


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refused(capsys, "plan", "-f", str(tmp_path / "none.yaml"))
    assert "Is a directory" in refused(capsys, "plan", "-f", str(tmp_path))
    (tmp_path / "latin").write_bytes(b"a: \xff")
    assert "not UTF-8 (byte 3)" in refused(capsys, "plan", "-f", str(tmp_path / "latin"))
    (tmp_path / "long").write_bytes(b"#" * (4 << 20))
    assert "is longer than" in refused(capsys, "plan", "-f", str(tmp_path / "long"))


def test_one_wrong_document_leaves_nothing_planned_and_every_fault_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    bad = GOOD.replace("chat", "worse").replace("tiny}}", "tiny}, decode: {replicas: -1}, drain: {windowSeconds: x}}")
    file.write_text(f"{GOOD}---\n{bad}")
    err = refused(capsys, "render", "-f", str(file), "--engine-image", IMAGE)
    assert "document 2, GLM52Deployment worse: spec.decode.replicas: Input should be greater than or equal to 0" in err
    assert "(found -1). Correct it" in err
    assert "spec.drain.windowSeconds" in err


def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GOOD.encode())))
    assert main(["plan", "-f", "-"]) == 0
    assert "(the one that the operator was installed with)" in capsys.readouterr().out


def test_the_members_of_a_list_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [yaml.safe_load(GOOD), None]}))
    assert main(["plan", "-f", str(file), "-n", "team"]) == 0
    assert "GLM52Deployment chat in namespace team" in capsys.readouterr().out


def test_a_namespace_that_contradicts_the_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(GOOD.replace("name: chat", "name: chat, namespace: one"))
    assert "metadata.namespace is one, --namespace says two" in refused(capsys, "plan", "-f", str(file), "-n", "two")


def test_nothing_is_rendered_without_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(GOOD)
    assert "give --engine-image" in refused(capsys, "render", "-f", str(file))


def test_dates_are_text_as_for_the_api_server() -> None:
    (found,) = parse(GOOD + "# x\n".replace("# x", "status: {x: 2024-99-99}"), "x").deployments
    assert found.resource["status"] == {"x": "2024-99-99"}


def test_a_null_is_a_field_that_is_left_out() -> None:
    (found,) = parse(f"{HEAD}spec: {{model: {{preset: tiny, path: }}, decode: }}\n", "x").deployments
    assert check.problems(found.resource) == []


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=list(ACCEPTED))
def test_what_the_api_server_takes_is_planned(changes: dict[str, Any]) -> None:
    obj = deployment(changes)
    assert check.problems(obj) == []
    assert check.target(Manifest(obj, "x"), "default", IMAGE)


@pytest.mark.parametrize("name", [name for name in REFUSED if name not in ("no spec",)])
def test_what_the_api_server_refuses_is_refused_with_its_path(name: str) -> None:
    changes, _ = REFUSED[name]
    found = check.problems(deployment(changes))
    assert found
    path = next(iter(changes))
    if path != "spec" and name not in ("unknown preset",) and not path.startswith("spec.model."):
        assert any(text.startswith(path) for text in found), found
    assert all(text.startswith(("spec", "metadata")) for text in found), found


@pytest.mark.parametrize("name", ["n" * (names.MAX_NAME + 1), "1st", "a.b", "A", "a-", "a\n"])
def test_a_name_that_no_child_could_carry_is_refused(name: str) -> None:
    (found,) = check.problems(deployment({}, name))
    assert "metadata.name must be" in found


def test_every_rule_of_the_schema_is_checked_here_too() -> None:
    # A new CEL rule needs its twin in ctl/check.py, or the plan of a file that the API server refuses looks well.
    assert set(check.rules()) == set(check.TWINS)


@given(st.text(max_size=60) | st.text(alphabet="{}[]:-&*!|>'\"\n #?,ab1.", max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    for given_text in (text, f"{HEAD}spec: {text}\n", f"{HEAD}spec: {{model: {{preset: tiny}}, decode: {text}}}\n"):
        try:
            deployments = parse(given_text, "x").deployments
        except CtlError:
            continue
        for each in deployments:
            check.problems(each.resource)
