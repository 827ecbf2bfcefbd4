"""SLURM jobs are stopped before they end, saved, and queued again by rank 0, never in a signal handler."""

from __future__ import annotations

import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer import signals as deadline_module
from lightning_faulttolerant.trainer.signals import signal_reason, stopped_by
from lightning_faulttolerant.trainer.stopping import Stopping
from tests.rank_runs import for_ranks
from tests.runs import make_trainer
from tests.trainer.ranks.slurm_jobs import Job

pytestmark = [
    *for_ranks,
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


def start_and_signal(job: Job, signum: int, *ranks: int, **arguments: Any) -> list[Any]:
    """Start a job, send a signal to some of its ranks in batch 3, and return how the ranks ended."""
    with job.start(**arguments) as processes:
        processes.wait_for("train 3", *range(job.num_ranks))
        processes.send(signum, *ranks)
        return processes.wait(seconds=30)


@pytest.mark.parametrize(
    ("num_ranks", "ranks"),
    [(1, (0,)), pytest.param(2, (0, 1), marks=pytest.mark.slow), pytest.param(2, (1,), marks=pytest.mark.slow)],
)
def test_signal_leads_to_a_save_and_a_requeue(num_ranks: int, ranks: tuple[int, ...], tmp_path: Path) -> None:
    """The job is saved at the boundary, then queued again once by rank 0; when it is restarted, it continues there."""
    job = Job(tmp_path, num_ranks=num_ranks)
    ended = start_and_signal(job, signal.SIGUSR1, *ranks)
    assert [each.exit_code for each in ended] == [76] * num_ranks, ended[0].output
    job.assert_queued_again()
    with job.start(environment={"SLURM_RESTART_COUNT": "1"}) as processes:
        again = processes.wait(seconds=30)
    assert [each.exit_code for each in again] == [0] * num_ranks, again[0].output
    assert "Resumed exactly" in again[0].output
    assert "train 0\n" not in again[0].output
    assert "has trained 16 steps" in again[0].output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scontrol", "message"),
    [
        ("echo 'Invalid job id' >&2; exit 3", "scontrol requeue 4711 ended with 3: Invalid job id"),
        ("missing", "scontrol is not on the PATH"),
    ],
)
def test_requeue_that_fails_is_said_loudly(scontrol: str, message: str, tmp_path: Path) -> None:
    """The job is saved, the exit code is the signal's, and stderr gives the remedy."""
    [ended] = start_and_signal(Job(tmp_path, scontrol=scontrol), signal.SIGUSR1, 0)
    assert ended.exit_code == 128 + signal.SIGUSR1
    assert "THE SLURM JOB IS NOT QUEUED AGAIN" in ended.output
    assert message in ended.output
    assert "Submit the job again" in ended.output


@pytest.mark.parametrize("unsaved", ["", "The state could not be saved: no space"])
def test_message_of_a_failed_requeue_says_whether_the_state_is_saved(
    unsaved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a save that has failed, no message says that the state is saved."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    stopping = Stopping(make_trainer([], tmp_path), FaultTolerance(tmp_path)._options)
    reason = signal_reason(signal.SIGUSR1, requeues=True)
    stopping.signals.note(reason)
    stopping.requeue(stopped_by(reason, "before batch 7", unsaved))
    said = capsys.readouterr().err
    assert f"Stopped by SIGUSR1 before batch 7. {unsaved}" in said
    assert "is saved" not in said


@pytest.mark.slow
def test_handler_of_the_users_own_keeps_the_signal(tmp_path: Path) -> None:
    """As with Lightning, a requeue signal that the script handles itself is left to the script."""
    job = Job(tmp_path)

    def before() -> None:
        signal.signal(signal.SIGUSR1, lambda signum, frame: print("the user's own", flush=True))

    [ended] = start_and_signal(job, signal.SIGUSR1, 0, before=before)
    assert ended.exit_code == 0, ended.output
    assert "the user's own" in ended.output
    assert not job.log.exists()


@pytest.mark.slow
def test_grace_period_that_is_over_still_leads_to_a_requeue(tmp_path: Path) -> None:
    """A batch that does not end keeps the job from being saved, not from being queued again."""
    job = Job(tmp_path, num_ranks=2)
    ended = start_and_signal(job, signal.SIGUSR1, 0, 1, options={"grace_seconds": 1.0}, seconds=0.5)
    assert [each.exit_code for each in ended] == [76, 76]
    assert job.log.read_text().splitlines() == ["requeue 4711"]


# A deadline that is known in advance.


@pytest.fixture
def _short_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_module, "RESERVE_SECONDS", 1.0)


@pytest.mark.usefixtures("_short_reserve")
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "auto_requeue"), [(1, False), (2, True)])
def test_end_of_the_job_is_a_deadline(num_ranks: int, auto_requeue: bool, tmp_path: Path) -> None:
    """Without any signal, the job is saved before its time is over, and queued again if requeueing is on."""
    job = Job(tmp_path, num_ranks=num_ranks)
    end = int(time.time()) + 8
    arguments = {"auto_requeue": auto_requeue, "max_epochs": 1000, "num_sanity_val_steps": 0}
    with job.start(environment={"SLURM_JOB_END_TIME": str(end)}, **arguments) as processes:
        ended = processes.wait(seconds=20)
    assert max(path.stat().st_mtime for path in job.directory.rglob("autosave-*")) < end
    assert [each.exit_code for each in ended] == [76 if auto_requeue else 75] * num_ranks, ended[0].output
    assert "Stopped by the deadline" in ended[0].output
    if auto_requeue:
        job.assert_queued_again()
    else:
        assert not job.log.exists()


@pytest.mark.slow
@pytest.mark.parametrize("auto_requeue", [False, True])
def test_deadline_that_has_passed_when_the_fit_begins(auto_requeue: bool, tmp_path: Path) -> None:
    """Nothing is trained: the run is saved at its first boundary, and ends with the deadline's exit code.

    The job is not queued again: it would end in the same way each time.
    """
    job = Job(tmp_path)
    options = {"deadline": datetime(2001, 1, 1)}
    with job.start(options=options, auto_requeue=auto_requeue, num_sanity_val_steps=0) as processes:
        [ended] = processes.wait(seconds=20)
    assert ended.exit_code == 75, ended.output
    assert "Stopped by the deadline before batch 0 of epoch 0" in ended.output
    assert "train 0" not in ended.output
    assert not job.log.exists()
