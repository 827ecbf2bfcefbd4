from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from tests.harness import night


def test_week_covers_all() -> None:
    """In any seven days, each piece runs, and its targets are those of the Makefile."""
    days = [datetime.date(2026, 11, 29) + datetime.timedelta(days=i) for i in range(7)]
    assert {name for day in days for name in night.pieces_of(day)} == set(night.PIECES)
    targets = re.findall("^([a-z-]+):", (night.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.split()[0] for piece in night.PIECES.values() for command in piece.commands} <= set(targets)


def test_results_have_dates_and_the_longest_wait_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that has never run, or else the one with the oldest date, has waited for the longest time."""
    monkeypatch.setattr(night, "RESULTS", tmp_path / "night.json")
    for i, name in enumerate(night.PIECES):
        assert night.table(night.read()).endswith(f"not run for the longest time: {name} (never)")
        day = datetime.date(2026, 11, 30) - datetime.timedelta(days=i)
        night.note(name, day, passed=name != "soak", lines="3 passed", seconds=60)
    assert night.read()["soak"] == {"date": "2026-11-29", "outcome": "FAILED", "tests": "3 passed", "minutes": "1"}
    last = list(night.PIECES)[-1]
    assert night.table(night.read()).endswith(f"not run for the longest time: {last} ({day})")


def test_piece_fails_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece passes if all its commands do, and says what they closed with; the seed is the day's."""
    (tmp_path / "Makefile").write_text(
        'test:\n\t@echo "=== 3 passed, seed $(LAWS_SEED) in 1.00s ==="\nbad:\n\t@false\n'
    )
    monkeypatch.setattr(night, "ROOT", tmp_path)
    day = datetime.date(2026, 11, 29)
    assert night.run(night.Piece(commands=("test LAWS_SEED={seed}",)), day) == (True, "3 passed, seed 20261129")
    assert night.run(night.Piece(commands=("test", "bad")), day) == (False, "3 passed, seed ; make bad: exit code 2")
