"""Durations of tests: the suite begins with the longest files, and fast tests stay fast.

`tests/durations.json` has the seconds of each file's fast and slow tests, as last recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from lightning_faulttolerant.testing.exactness import NotTheSame

RECORDED = Path(__file__).parent.parent / "durations.json"
LIMIT_SECONDS = 10.0
"""A fast test that takes longer fails, unless its mark gives the reason: ``@pytest.mark.takes_long("why")``."""
LAWS = "tests/law/"
_SIGNS_OF_SLOW_TESTS = ("slow", "any_url", "remote_url", "object_states")
"""The mark, fixtures that have it for some stores, and the module that has it for some faults."""
_TRAINING_SECONDS = 0.5
_PRESSURE = Path("/proc/pressure/cpu")


@dataclass(kw_only=True, slots=True)
class Report:
    """The outcomes and the duration of a file's tests."""

    outcomes: dict[str, int] = field(default_factory=dict)
    not_passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """The tests of `not_passed` that may run again: those in which no resumed run differed from the whole run."""
    seconds: float = 0.0
    processor_seconds: float = 0.0
    """Of its process and all that it started and waited for: this hardly depends on what runs beside it."""
    shortest: str = ""
    """The shortest of the tests that took long enough to have run a training."""
    shortest_seconds: float = float("inf")


class Reporter:
    """A plugin that collects a `Report` and writes it to a file at the end.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._report = Report()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test."""
        self._report.seconds += report.duration
        outcome = report.outcome if report.when == "call" or report.outcome != "failed" else "error"
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        if report.when == "call" or outcome in ("skipped", "error"):
            self._count(outcome)
        if report.failed:
            reason = _reason(report)
            self._report.not_passed.append(f"{report.nodeid} ({report.duration:.0f} s){reason}")
            if NotTheSame.__name__ not in reason:
                self._report.failed.append(report.nodeid)
        if (
            report.when == "call"
            and report.passed
            and _TRAINING_SECONDS < report.duration < self._report.shortest_seconds
        ):
            self._report.shortest, self._report.shortest_seconds = report.nodeid, report.duration

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that can't be imported."""
        if report.failed:
            self._count("error")
            self._report.not_passed.append(f"{report.nodeid}{_reason(report)}")

    def _count(self, outcome: str) -> None:
        self._report.outcomes[outcome] = self._report.outcomes.get(outcome, 0) + 1

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
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
    recorded = {file: kinds for file, kinds in _recorded().items() if (RECORDED.parent.parent / file).exists()}
    for file, report in reports.items():
        of_file = recorded.setdefault(file, {})
        of_file[kind] = round(report.seconds, 1)
        if kind == "fast" and report.shortest:
            of_file["shortest"] = report.shortest
    RECORDED.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")


class CalmSeconds:
    """Counts the seconds in which nothing on this machine waited for a processor: a busy machine is not a failure.

    Args:
        pressure: The kernel's file with the waiting time.
    """

    def __init__(self, pressure: Path | None = None) -> None:
        self._pressure = pressure or _PRESSURE
        self._began, self._waited = perf_counter(), self._seconds_waited()

    def __call__(self) -> float:
        """Return the number of seconds so far."""
        return perf_counter() - self._began - (self._seconds_waited() - self._waited)

    def _seconds_waited(self) -> float:
        """Return the total waiting time since the machine booted; 0 if the kernel can't report it."""
        try:
            return int(self._pressure.read_text().split("\n")[0].rpartition("total=")[2]) / 1e6
        except (OSError, ValueError):
            return 0.0


_CALM = pytest.StashKey[CalmSeconds]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Start counting."""
    item.stash[_CALM] = CalmSeconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Make a fast test fail if it takes too long."""
    report = yield
    seconds = item.stash[_CALM]()
    if call.when == "call" and report.passed and seconds > LIMIT_SECONDS and not _may_take_long(item):
        report.outcome = "failed"
        report.longrepr = (
            f"It took {seconds:.0f} s, and a fast test may take {LIMIT_SECONDS:.0f}. Make it faster, mark it as slow,"
            ' or give the reason: @pytest.mark.takes_long("why").'
        )
    return report


def _may_take_long(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("takes_long")
    return item.get_closest_marker("slow") is not None or (mark is not None and bool(mark.args))


def may_have_slow_tests(file: Path) -> bool:
    """Return whether a file can have slow tests. To start pytest only to find none takes 0.15 s of processor time.

    tests/conftest.py marks some cases of laws, and refuses a slow test in a file for which this returns False.
    """
    text = file.read_text()
    return LAWS in file.as_posix() or any(sign in text for sign in _SIGNS_OF_SLOW_TESTS)


def shortest_tests() -> set[str]:
    """Return the shortest test of each file, as last recorded."""
    return {kinds["shortest"] for kinds in _recorded().values() if "shortest" in kinds}


def _recorded() -> dict[str, dict[str, Any]]:
    recorded: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return recorded
