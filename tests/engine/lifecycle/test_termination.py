from __future__ import annotations

from pathlib import Path

import pytest

from glm52_engine.config import EXIT_CODES, Outcome, Termination
from glm52_engine.lifecycle.termination import last_line, leave


@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_last_words_are_json_and_the_exit_code_goes_with_them(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "termination"
    monkeypatch.setenv("TERMINATION_LOG", str(file))
    monkeypatch.setenv("POD_NAME", "chat-decode-0")
    assert leave(outcome, "decode", "because", in_flight=3) == EXIT_CODES[outcome]
    assert Termination.decode(file.read_text()) == Termination(
        outcome=outcome, role="decode", host="chat-decode-0", message="because", in_flight=3
    )


def test_a_place_that_cannot_be_written_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINATION_LOG", "/proc/none/here")
    assert leave(Outcome.CRASHED, "decode", "because") == EXIT_CODES[Outcome.CRASHED]


def test_an_exception_becomes_one_line() -> None:
    assert last_line(RuntimeError("a\n  b")) == "RuntimeError: a b"
    assert last_line(ValueError()) == "ValueError"
