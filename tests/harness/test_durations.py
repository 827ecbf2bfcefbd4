from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import durations
from tests.harness.durations import Report, longest_first, record


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
    record({"tests/test_short.py": Report(seconds=3.21)}, "fast")
    assert json.loads(recorded.read_text()) == {
        "tests/test_long.py": {"fast": 20.0, "slow": 1.0},
        "tests/test_short.py": {"fast": 3.2, "slow": 90.0},
    }
