"""State of the script itself, its globals and classes, if `__main__` is not the script: in jobs, profiled."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import submitit

from tests.starts.started import Project, Started, continues, plain

SCRIPT = "state_in_main.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Yield a directory with the scripts, and a short one for Ray's sockets."""
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 2)
    directory = tempfile.mkdtemp(prefix="ray-")
    yield Project(tmp_path / "project", {"RAY_DIRECTORY": directory})
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(
    "command",
    [
        (SCRIPT, "here"),
        ("-m", "cProfile", "-o", "profile.out", SCRIPT, "here"),
        (SCRIPT, "submitit"),
        (SCRIPT, "joblib"),
        (SCRIPT, "ray"),
    ],
    ids=lambda command: "profiler" if command[0] == "-m" else command[1],
)
def test_is_continued(command: tuple[str, ...], project: Project) -> None:
    """Globals continue that grow, that are rebound, that hold objects of the script's classes, and that draw."""
    starts: list[Started] = [project.start(*command, interrupt=f"TERM@{step}@fit") for step in (3, 8)]
    starts.append(project.start(*command))
    assert starts[-1].exit_code == 0, starts[-1].output
    for before, after in itertools.pairwise(starts):
        continues(before, after)
    [kept] = [event["kept"] for event in starts[-1].values("fit")]
    assert kept == plain(SCRIPT, "here").started.values("fit")[0]["kept"]
    assert starts[-1].weights()["fit"] == plain(SCRIPT, "here").started.weights()["fit"]
