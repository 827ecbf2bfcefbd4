from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.cli import supervisor as supervisor_module
from lightning_faulttolerant.cli.supervisor import RestartPolicy, SupervisionEnded, Supervisor, kill
from lightning_faulttolerant.processes import is_running
from lightning_faulttolerant.supervision.heartbeats import (
    OUTSIDE,
    SAVE,
    TRAINING_BATCH,
    Heartbeat,
    TrainingFailure,
    read_failures,
    write_failure,
)


def sleeper(directory: Path | None = None) -> int:
    """Start a process that sleeps in a save, with a limit of a tenth of a second; return its id."""
    process_id = os.fork()
    if not process_id:
        if directory is not None:
            heartbeat = Heartbeat(directory)
            heartbeat.describe(rank=0, num_ranks=1, hang=0, hang_timeout_ms=100)
            heartbeat.begin(SAVE)
        time.sleep(60)
        os._exit(1)
    return process_id


def test_a_hung_process_is_killed_before_its_report_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report goes into a directory that may hang itself."""
    supervisor = Supervisor(RestartPolicy(5))
    process_id = sleeper(supervisor.directory)
    found: list[bool] = []

    def write(text: str, directory: str) -> str:
        os.waitpid(process_id, 0)  # or this test would hang
        found.append("rank 0 has been in the section save" in text)
        return ""

    monkeypatch.setattr(supervisor_module, "write_hang_report", write)
    deadline = time.monotonic() + 20
    while not found and time.monotonic() < deadline:
        supervisor.look()
        time.sleep(0.05)
    supervisor.close()
    assert found == [True]
    assert not supervisor.directory.exists()


def test_processes_are_killed_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """MacOS has no ``/proc``, so no state is known."""
    monkeypatch.setattr(supervisor_module, "parents_and_states", lambda: ({}, {}))
    process_id = sleeper()
    kill({process_id})
    os.waitpid(process_id, 0)
    assert not is_running(process_id)


def test_a_mark_that_vanishes_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may remove its own file while the supervisor forgets a start."""
    supervisor = Supervisor(RestartPolicy(5))
    monkeypatch.setattr(Path, "iterdir", lambda path: iter([path / "gone"]))
    supervisor.begin_start()
    monkeypatch.undo()
    supervisor.close()


def test_each_start_forgets_what_the_one_before_has_told() -> None:
    """Also one that comes without a failure, when a machine joins; an autosave before it counts as progress."""
    supervisor = Supervisor(RestartPolicy(2))
    supervisor.begin_start()
    supervisor.after_failure([1])
    supervisor.begin_start()
    Heartbeat(supervisor.directory).note_saved((1, 0, 5, 0))
    failure = TrainingFailure(kind="ValueError", text="boom", function="fit", epoch=0, batch=5, time=1.0)
    write_failure(supervisor.directory, failure)
    supervisor.begin_start()
    assert read_failures(supervisor.directory) == []
    supervisor.after_failure([1])
    with pytest.raises(SupervisionEnded, match="2 starts in a row ended without a new autosave"):
        supervisor.after_failure([1])
    supervisor.close()


@pytest.mark.parametrize(("section", "is_cut"), [(TRAINING_BATCH, True), (OUTSIDE, False)])
def test_a_process_that_ends_with_0_in_a_fit_is_no_success(section: int, is_cut: bool) -> None:
    """Nor does a fit of another process say anything about those that were started."""
    supervisor = Supervisor(RestartPolicy(5))
    supervisor.begin_start()
    started, other = (ended_in(supervisor.directory, each) for each in (section, TRAINING_BATCH))
    supervisor.note_started([started])
    assert supervisor.is_cut() == is_cut
    supervisor.note_started([other])
    assert supervisor.is_cut()
    supervisor.note_started([])
    assert not supervisor.is_cut()
    supervisor.close()


def ended_in(directory: Path, section: int) -> int:
    """Return the id of a process that has ended in a section."""
    process_id = os.fork()
    if not process_id:
        Heartbeat(directory).begin(section)
        os._exit(0)
    os.waitpid(process_id, 0)
    return process_id
