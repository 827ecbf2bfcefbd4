"""Ledgers are read back as they were written, whole or torn."""

from __future__ import annotations

from pathlib import Path

from lightning_faulttolerant.records.ledger import path_of_rank
from lightning_faulttolerant.records.lines import LineFile
from tests.ledgers import read_ledger


def written(path: Path, *lines: dict[str, object]) -> None:
    """Add lines to a ledger, as one process does."""
    file = LineFile(path)
    for line in lines:
        file.append({"fit": 1, **line})
    file.close()
    file.close()


def test_fits_are_told_apart(tmp_path: Path) -> None:
    """Each begins with its first line, in one process or in several that write to one file."""
    path = tmp_path / "ledger.jsonl"
    written(path, {"event": "fit"}, {"event": "batch"}, {"event": "end"}, {"event": "fit", "fit": 2})
    written(path, {"event": "fit"}, {"event": "resumed", "batch": 1}, {"event": "batch"}, {"event": "log"})
    ledger = read_ledger(path)
    assert [fit.number for fit in ledger.fits] == [1, 2, 1]
    assert [fit.resumed is not None for fit in ledger.fits] == [False, False, True]
    assert [fit.end is not None for fit in ledger.fits] == [True, False, False]
    assert [line["event"] for line in ledger.events] == ["batch", "end", "batch", "log"]
    assert [line["event"] for line in ledger.fits[2].of("batch")] == ["batch"]
    assert ledger.fits[0].begun == {"event": "fit", "fit": 1}


def test_a_ledger_that_is_not_there_is_empty(tmp_path: Path) -> None:
    """A run that has begun no fit has none."""
    assert read_ledger(tmp_path / "none.jsonl").fits == ()


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    """A line torn by a kill is skipped, and the next process begins a new line."""
    path = tmp_path / "ledger.jsonl"
    written(path, {"event": "fit"}, {"event": "batch", "batch": 0}, {"event": "batch", "batch": 1})
    path.write_bytes(path.read_bytes()[:-5])
    written(path, {"event": "fit"}, {"event": "batch", "batch": 1})
    first, second = read_ledger(path).fits
    assert [[line["batch"] for line in fit.of("batch")] for fit in (first, second)] == [[0], [1]]


def test_a_torn_beginning_costs_its_fit_only(tmp_path: Path) -> None:
    """Lines of a fit without its first line belong to no fit."""
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "fi\n{"event": "batch", "fit": 1}\n{"event": "fit", "fit": 2}\n')
    assert [(fit.number, fit.events) for fit in read_ledger(path).fits] == [(2, ())]


def test_each_rank_has_its_file() -> None:
    """Rank 0 has the requested file."""
    assert [path_of_rank("a.jsonl", rank) for rank in (0, 11)] == ["a.jsonl", "a.jsonl.rank-11"]
