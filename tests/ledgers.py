"""Helpers that the tests of ledgers share: they ask for a ledger, and read it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.ledger import END, FIT, RESUMED
from lightning_faulttolerant.records.lines import Line, read_lines


def with_ledger(path: Path | str, *arguments: Any, **options: Any) -> FaultTolerance:
    """Return a callback that writes a ledger, as if the environment had asked for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ledger.LEDGER_VARIABLE, str(path))
        return FaultTolerance(*arguments, **options)


@dataclass(frozen=True, kw_only=True, slots=True)
class FitLines:
    """What one process did of one fit or evaluation.

    Args:
        number: The number of the fit or evaluation in its script, from 1.
        begun: The line that begins it.
        resumed: The line that says where it continued, if it did.
        events: All other lines, in order.
    """

    number: int
    begun: Line
    resumed: Line | None
    events: tuple[Line, ...]

    def of(self, kind: str) -> tuple[Line, ...]:
        """Return the lines of one kind."""
        return tuple(line for line in self.events if line["event"] == kind)

    @property
    def end(self) -> Line:
        """The line of its end."""
        [line] = self.of(END)
        return line


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What one rank did, in one process, or in each process if several have written to one file.

    Args:
        fits: The fits, in the order in which they began.
    """

    fits: tuple[FitLines, ...]


def read_ledger(path: str | os.PathLike[str]) -> Ledger:
    """Return the content of a ledger; no fits if it does not exist. A line that a kill has torn is skipped.

    Args:
        path: The file of one rank.
    """
    fits: list[list[Line]] = []
    for line in read_lines(path):
        if line.get("event") == FIT:
            fits.append([line])
        elif fits:  # otherwise the line before it is torn
            fits[-1].append(line)
    return Ledger(fits=tuple(_fit(*lines) for lines in fits))


def _fit(begun: Line, *lines: Line) -> FitLines:
    return FitLines(
        number=begun["fit"],
        begun=begun,
        resumed=next((line for line in lines if line["event"] == RESUMED), None),
        events=tuple(line for line in lines if line["event"] != RESUMED),
    )
