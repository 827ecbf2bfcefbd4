"""SLURM: the job's number, the end of its time, and the message if it can't be queued again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_faulttolerant.trainer.stopping import asked_end_time, end_time, requeue

ARRAY = {"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}
NUMBERS = [({"SLURM_JOB_ID": "12"}, "12"), (ARRAY, "10_3")]
JOB = NUMBERS[0][0]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an ``scontrol`` on the PATH, and return the file to which it writes its arguments."""
    script = tmp_path / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called.txt\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "called.txt"


def answer(called: Path, text: str) -> None:
    """Let ``scontrol`` answer."""
    with open(called.parent / "scontrol", "a") as script:
        script.write(f"{text}\n")


@pytest.mark.parametrize(("environment", "number"), NUMBERS)
def test_number_of_the_job(environment: dict[str, str], number: str, called: Path) -> None:
    """A task of an array is queued again by itself, not the whole array; its end is asked for whatever the zone is."""
    assert requeue(environment) == ""
    end = int(time.time()) + 100
    answer(called, f'[ "$SLURM_TIME_FORMAT" = %s ] && echo "JobId=12 StartTime=1 EndTime={end} Deadline=N/A"')
    assert asked_end_time(environment) == end
    assert called.read_text() == f"requeue {number}\n--oneliner show job {number}\n"


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_JOB_ID": "12; rm -rf /"}, {"SLURM_JOB_ID": "1", "SLURM_ARRAY_JOB_ID": "10"}]
)
def test_job_without_a_number(environment: dict[str, str], called: Path) -> None:
    """A value that is not a job number is not passed on."""
    assert "the job has no number" in requeue(environment)
    assert not called.exists()


def test_end_time(caplog: pytest.LogCaptureFixture) -> None:
    """The value is in seconds since 1970; any other value is reported and ignored."""
    ends = [end_time({"SLURM_JOB_END_TIME": text} if text else {}) for text in ("1700000000", "", "tomorrow")]
    assert ends == [1_700_000_000.0, None, None]
    [message] = caplog.messages
    assert "SLURM_JOB_END_TIME is 'tomorrow'" in message


@pytest.mark.parametrize("end", ["Unknown", "1700000000", "2030-01-01T00:00:00"])
def test_end_that_slurm_does_not_know(end: str, called: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A job without a limit has no end, and one that may exceed its limit has an end that has passed."""
    answer(called, f'echo "JobId=12 EndTime={end}"')
    assert asked_end_time(JOB) is None
    assert caplog.text == ""


def test_end_that_can_not_be_asked_for(called: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Outside of a job, nothing is asked. A failure is logged."""
    assert asked_end_time({}) is None
    assert not called.exists()
    answer(called, "echo no controller >&2; exit 1")
    assert asked_end_time(JOB) is None
    assert "show job 12 ended with 1: no controller: the end of the job is not known" in caplog.text
