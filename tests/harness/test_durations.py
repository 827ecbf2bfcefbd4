from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest
from tests.harness import durations
from tests.harness.durations import CalmSeconds, Report, longest_first, record

ROOT = Path(__file__).parent.parent.parent

CONFTEST = """
import sys
sys.path.insert(0, {root!r})
from tests.harness import durations
durations.LIMIT_SECONDS = 0.2
durations._PRESSURE = durations.Path({pressure!r})

def pytest_configure(config):
    config.pluginmanager.register(durations)
    for mark in ("slow", "takes_long"):
        config.addinivalue_line("markers", mark)
"""
TESTS = """
import time
import pytest

def test_short():
    pass

def test_long():
    time.sleep(0.4)

@pytest.mark.slow
def test_slow():
    time.sleep(0.4)

@pytest.mark.takes_long("it waits for the clock")
def test_long_with_a_reason():
    time.sleep(0.4)

@pytest.mark.takes_long
def test_long_without_a_reason():
    time.sleep(0.4)
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of an earlier suite."""
    (tmp_path / "tests").mkdir()
    for name in ("short", "long"):
        (tmp_path / f"tests/test_{name}.py").touch()
    path = tmp_path / "tests" / "durations.json"
    seconds = {"tests/test_long.py": {"fast": 20.0, "slow": 1.0}, "tests/test_short.py": {"fast": 0.5, "slow": 90.0}}
    path.write_text(json.dumps({**seconds, "tests/test_gone.py": {"fast": 1.0}}))
    monkeypatch.setattr(durations, "RECORDED", path)
    return path


def test_long_files_come_first(recorded: Path) -> None:
    """Files are sorted by the seconds of the tests to run. A file without a record may be the longest."""
    files = ["tests/test_short.py", "tests/test_new.py", "tests/test_long.py"]
    assert longest_first(files, "fast") == ["tests/test_new.py", "tests/test_long.py", "tests/test_short.py"]
    assert longest_first(files, "slow") == ["tests/test_new.py", "tests/test_short.py", "tests/test_long.py"]


def test_record_keeps_what_did_not_run_and_drops_what_is_gone(recorded: Path) -> None:
    """Durations of tests that ran are updated, others stay, and those of deleted files are dropped."""
    record({"tests/test_short.py": Report(seconds=3.21, shortest="tests/test_short.py::test_it")}, "fast")
    assert json.loads(recorded.read_text()) == {
        "tests/test_long.py": {"fast": 20.0, "slow": 1.0},
        "tests/test_short.py": {"fast": 3.2, "slow": 90.0, "shortest": "tests/test_short.py::test_it"},
    }


def test_a_fast_test_that_takes_long_fails_unless_it_has_a_reason(tmp_path: Path) -> None:
    """Beyond the limit, a test passes only if it is slow or its mark gives a reason."""
    (tmp_path / "conftest.py").write_text(CONFTEST.format(root=str(ROOT), pressure=str(tmp_path / "none")))
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir=.", "-rA", "."]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    outcomes = dict(
        reversed(line.split(" - ")[0].replace("test_it.py::", "").split())
        for line in ended.stdout.splitlines()
        if line.startswith(("PASSED", "FAILED"))
    )
    assert outcomes == {
        "test_short": "PASSED",
        "test_long": "FAILED",
        "test_slow": "PASSED",
        "test_long_with_a_reason": "PASSED",
        "test_long_without_a_reason": "FAILED",
    }
    assert "a fast test may take" in ended.stdout


def test_time_in_which_others_have_the_processor_does_not_count(tmp_path: Path) -> None:
    """A busy machine makes a test slower, which is not the test's fault."""
    pressure = tmp_path / "cpu"
    pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\nfull total=0\n")
    seconds = CalmSeconds(pressure)
    pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=61000000\nfull total=0\n")
    assert seconds() < 0


class Item:
    """The parts of `pytest.Item` that are needed."""

    def __init__(self, path: Path, mark: str) -> None:
        self.path = path
        self._mark = mark

    def get_closest_marker(self, name: str) -> str | None:
        """Return a mark."""
        return name if name == self._mark else None


@pytest.mark.parametrize(
    ("name", "text", "may_have"),
    [
        ("test_a.py", "def test_a(): pass", False),
        ("test_a.py", "@pytest.mark.slow\ndef test_a(): pass", True),
        ("test_a.py", "def test_a(any_url): pass", True),
        ("tests/law/test_a.py", "def test_a(): pass", True),
    ],
)
def test_files_without_slow_tests_are_left_out(name: str, text: str, may_have: bool, tmp_path: Path) -> None:
    """A file that `make slow` leaves out must have no slow test: the suite refuses one."""
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert durations.may_have_slow_tests(path) == may_have
    conftest.assert_slow_tests_are_found([Item(path, "takes_long")])  # type: ignore[list-item]
    refused = contextlib.nullcontext() if may_have else pytest.raises(pytest.UsageError, match=r"test_a\.py")
    with refused:
        conftest.assert_slow_tests_are_found([Item(path, "slow")])  # type: ignore[list-item]
