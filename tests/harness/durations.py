"""Durations of tests: the suite begins with the longest files.

`tests/durations.json` has the seconds of each file's fast and slow tests, as last recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parent.parent / "durations.json"


@dataclass(kw_only=True, slots=True)
class Report:
    """The outcomes and the duration of a file's tests."""

    outcomes: dict[str, int] = field(default_factory=dict)
    not_passed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    processor_seconds: float = 0.0
    """Of its process and all that it started and waited for: this hardly depends on what runs beside it."""


class Reporter:
    """A plugin that collects a `Report` and writes it to a file at the end.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._report = Report()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._report.seconds += report.duration
        outcome = report.outcome if report.when == "call" or report.outcome != "failed" else "error"
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        if report.when == "call" or outcome in ("skipped", "error"):
            self._count(outcome)
        if report.failed:
            reason = _reason(report)
            self._report.not_passed.append(f"{report.nodeid} ({report.duration:.0f} s){reason}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._count("error")
            self._report.not_passed.append(f"{report.nodeid}{_reason(report)}")

    def _count(self, outcome: str) -> None:
        self._report.outcomes[outcome] = self._report.outcomes.get(outcome, 0) + 1

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(asdict(self._report)))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the first line and the place of a failure, for readers who see only the list of failures."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return ""
    return f": {crash.message.partition(chr(10))[0][:300]} ({Path(crash.path).name}:{crash.lineno})"


def longest_first(files: Iterable[str], kind: str) -> list[str]:
    """Sort files by the duration of their tests of this kind. A file that was never recorded comes first."""
    recorded = _recorded()
    return sorted(files, key=lambda file: (-recorded.get(file, {kind: 1e6}).get(kind, 0.0), file))


def record(reports: Mapping[str, Report], kind: str) -> None:
    """Record the durations of the tests of this kind, and keep the records of other files."""
    root = RECORDED.parent.parent
    recorded = {file: kinds for file, kinds in _recorded().items() if (root / file.split()[0]).exists()}
    for file, report in reports.items():
        recorded.setdefault(file, {})[kind] = round(report.seconds, 1)
    RECORDED.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")


def _recorded() -> dict[str, dict[str, Any]]:
    recorded: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return recorded
