from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from glm52_engine.config import EXIT_CODES, Outcome, Termination
from glm52_engine.lifecycle import logs
from glm52_engine.lifecycle.termination import last_line, leave, stack_of


@pytest.fixture
def last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "termination"
    monkeypatch.setenv("TERMINATION_LOG", str(file))
    monkeypatch.setenv("POD_NAME", "chat-decode-0")
    return file


@pytest.mark.parametrize("outcome", list(Outcome))
def test_the_last_words_are_json_and_the_exit_code_goes_with_them(outcome: Outcome, last_words: Path) -> None:
    assert leave(outcome, "decode", "because", in_flight=3) == EXIT_CODES[outcome]
    told = Termination.decode(last_words.read_text())
    assert told is not None
    assert (told.outcome, told.role, told.host, told.message) == (outcome, "decode", "chat-decode-0", "because")
    assert (told.in_flight, told.code) == (3, EXIT_CODES[outcome])


def test_a_crash_leaves_marker_rank_and_the_log_before_it(last_words: Path) -> None:
    logs.setup("decode")
    log = logging.getLogger("test")
    for number in range(40):
        log.info("step %d", number)
    log.error("it broke", exc_info=ValueError("no\nnumber"))
    leave(Outcome.CRASHED, "decode", "rank 3 failed", rank=3)
    told = Termination.decode(last_words.read_text())
    assert told is not None
    assert (told.marker, told.rank) == ("CRASH_chat-decode-0", 3)
    assert told.log[-1].endswith("ERROR it broke (ValueError: no number)")
    assert "step 39" in told.log[-2]
    assert not any("step 10" in line for line in told.log)


def test_an_end_that_was_asked_for_leaves_no_marker(last_words: Path) -> None:
    leave(Outcome.DRAINED, "decode", "drained")
    told = Termination.decode(last_words.read_text())
    assert told is not None
    assert (told.marker, told.rank, told.log) == ("", None, ())


def test_where_a_thread_hangs_is_told() -> None:
    stop = threading.Event()

    def hang_here() -> None:
        stop.wait(60)

    thread = threading.Thread(target=hang_here, name="rank-7")
    thread.start()
    try:
        assert "hang_here (test_termination.py:" in stack_of("rank-7")
    finally:
        stop.set()
        thread.join()
    assert stack_of("rank-7") == "no thread named rank-7"


def test_a_place_that_cannot_be_written_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERMINATION_LOG", "/proc/none/here")
    assert leave(Outcome.CRASHED, "decode", "because") == EXIT_CODES[Outcome.CRASHED]


def test_an_exception_becomes_one_line() -> None:
    assert last_line(RuntimeError("a\n  b")) == "RuntimeError: a b"
    assert last_line(ValueError()) == "ValueError"
