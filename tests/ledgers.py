"""Helpers that tests share: they ask for a ledger, and read it, or the history of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.cli.found import find_checkpoints
from lightning_faulttolerant.cli.histories import runs_of
from lightning_faulttolerant.records import history, ledger
from lightning_faulttolerant.records.ledger import END, FIT
from lightning_faulttolerant.records.lines import Line, read_lines


def with_ledger(path: Path | str, *arguments: Any, **options: Any) -> FaultTolerance:
    """Return a callback that writes a ledger, as if the environment had asked for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ledger.LEDGER_VARIABLE, str(path))
        return FaultTolerance(*arguments, **options)


class FitLines(list[Line]):
    """What one process did of one fit or evaluation. The first line begins it."""

    def of(self, kind: str) -> list[Line]:
        """Return the lines of one kind."""
        return [line for line in self if line["event"] == kind]

    @property
    def end(self) -> Line:
        """The line of its end."""
        [line] = self.of(END)
        return line


def read_ledger(path: str | os.PathLike[str]) -> list[FitLines]:
    """Return the fits in the ledger of one rank; none if it does not exist. A line that a kill has torn is skipped."""
    fits: list[FitLines] = []
    for line in read_lines(path):
        if line.get("event") == FIT:
            fits.append(FitLines())
        if fits:  # otherwise the line before it is torn
            fits[-1].append(line)
    return fits


def chapter_of(directory: Path | str) -> history.Chapter:
    """Return the only chapter of the only run below a directory."""
    [found] = runs_of(find_checkpoints(str(directory)))
    [chapter] = found.history.chapters
    return chapter
