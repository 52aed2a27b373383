from __future__ import annotations

from glm52_engine.runtime.progress import ProgressLines
from glm52_engine.sizing import GIB, MIB


def lines(total: int, tile: int) -> list[str]:
    said: list[str] = []
    progress = ProgressLines("reading weights", said.append)
    for done in range(tile, total + tile, tile):
        progress(min(done, total), total)
    return said


def test_a_line_for_every_twentieth() -> None:
    said = lines(700 * GIB, 16 * MIB)
    assert len(said) == 20
    assert said[0] == "reading weights: 5 % of 700 GiB"
    assert said[-1] == "reading weights: 100 % of 700 GiB"


def test_lines_do_not_drift_apart() -> None:
    assert len(lines(100 * GIB, 3 * GIB)) == 20


def test_what_takes_no_time_is_not_mentioned() -> None:
    assert lines(100 * MIB, 16 * MIB) == []
    assert len(lines(GIB, 16 * MIB)) == 4


def test_one_step_over_many_twentieths_is_one_line() -> None:
    assert lines(100 * GIB, 40 * GIB) == [f"reading weights: {part} % of 100 GiB" for part in (40, 80, 100)]
