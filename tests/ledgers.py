"""Helpers that the tests of ledgers share: they join the ledgers of a run's processes where each resumed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.ledger import FitLines, read_ledger

__all__ = ["compared", "joined", "read_ledger"]

_NOT_COMPARED = ("time", "path", "pid")


def compared(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what two runs must have in common: all but times and autosaves."""
    kept = (line for line in lines if line["event"] != ledger.AUTOSAVE)
    return [{name: value for name, value in line.items() if name not in _NOT_COMPARED} for line in kept]


def joined(processes: Sequence[FitLines]) -> list[dict[str, Any]]:
    """Return what a fit did in all its processes together, as `records.ledger` defines it."""
    lines: list[dict[str, Any]] = []
    for process in processes:
        if process.resumed is not None:
            lines = _in_front_of(process.resumed, lines)
        lines += compared(process.events)
    return lines


def _in_front_of(resumed: dict[str, Any], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    position = (resumed["epoch"], resumed["batch"])
    kept = list(itertools.takewhile(lambda line: line["event"] != ledger.END and _done(line) <= position, lines))
    continued = resumed.get("validation_batch", 0)
    if resumed["text"].startswith("at the validation run") or "validation_batch" in resumed:
        kept = [
            line
            for line in kept
            if _done(line) < position
            or not _is_of_validation(line)
            or line.get("validation_batch", continued + 1) <= continued
        ]
    return kept


def _done(line: dict[str, Any]) -> tuple[int, int]:
    return line["epoch"], line["batch"] + (line["event"] == ledger.BATCH)


def _is_of_validation(line: dict[str, Any]) -> bool:
    return line["event"] in (ledger.VALIDATED, ledger.EVALUATED) or bool(line.get("validating"))
