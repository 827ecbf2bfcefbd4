"""Real processes that hang: each run ends by itself, with the weights of the undisturbed script."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.supervision.heartbeats import read_heartbeats
from tests.cli.supervise.supervised import Trial, begin, supervised, undisturbed
from tests.histories import chapter_of

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
SHORT = "HangWatch.timeout=5"
STUCK_SECONDS = 10


def reports(trial: Trial) -> list[str]:
    """Return the reports of hangs next to the autosaves."""
    return [path.read_text() for path in sorted(trial.directory.glob("autosaves/*/hang-*.txt"))]


@pytest.mark.parametrize("flaw", ["SIGSTOP", "GIL", "sleep"])
def test_a_hung_process_is_started_again(tmp_path: Path, flaw: str) -> None:
    """It is noticed though no Python runs in it; the report says where it was, with its stack if it has one."""
    trial = supervised(tmp_path, "--flaw", flaw, flags=SHORT)
    assert (trial.exit_code, trial.num_starts) == (0, 2), trial.output
    assert trial.told("weights") == undisturbed()
    [report] = reports(trial)
    assert "rank 0 has been in the section training batch (epoch 0, batch 5)" in report
    assert ("stopped by a signal" if flaw == "SIGSTOP" else "in training_step") in report
    [hang] = {process.hang for process in chapter_of(trial.directory / "autosaves").processes} - {None}
    assert hang is not None
    assert 4 < hang[1] - hang[0] < 30  # the next start has told of it
    assert "See " in trial.output


@pytest.mark.parametrize("flaw", ["GIL", "SIGSTOP"])
def test_without_the_watcher_it_hangs_for_ever(tmp_path: Path, flaw: str) -> None:
    """The negative control: with ``HangWatch.action=off``, nothing ends the same script."""
    trial = begin(tmp_path, "--flaw", flaw, flags=f"{SHORT}, HangWatch.action=off")
    while len(trial.steps()) < 6:
        time.sleep(0.05)
    with pytest.raises(TimeoutError):
        trial.wait(STUCK_SECONDS)
    assert len(trial.steps()) == 6


def test_a_worker_in_a_deadlock_is_found(tmp_path: Path) -> None:
    """The report has the stack of the data-loading worker that waits for a lock."""
    trial = supervised(tmp_path, "--flaw", "worker", "--workers", "2", flags=SHORT)
    assert (trial.exit_code, trial.num_starts) == (0, 2), trial.output
    assert trial.told("weights") == undisturbed(num_workers=2)
    [report] = reports(trial)
    rank, *workers = report.split("started by rank 0")
    assert "in _try_get_data" in rank
    assert "in __getitem__" in "".join(workers)


def test_the_rank_that_never_reaches_its_collective_is_named(tmp_path: Path) -> None:
    """One rank waits in a collective, the other one is behind; both are ended and continue together."""
    trial = supervised(tmp_path, "--flaw", "sleep", "--rank", "1", flags=SHORT, options=("--nproc-per-node", "2"))
    assert (trial.exit_code, trial.num_starts) == (0, 4), trial.output
    assert trial.told("weights") == undisturbed(2)
    [report] = reports(trial)
    assert "The others wait in a collective for rank 1." in report


@pytest.mark.parametrize("flaw", ["SIGSTOP", "GIL"])
def test_without_run_a_hung_process_ends_with_a_documented_code(tmp_path: Path, flaw: str) -> None:
    """``HangWatch`` starts its own watcher; the same command continues, and no process is left."""
    words, flags = ("--flaw", flaw), f"{SHORT}, HangWatch.action=stop"
    hung = begin(tmp_path, *words, options=None, flags=flags, PL_FAULT_TOLERANT_TRAINING="1").wait()
    assert hung.exit_code == 60, hung.output
    assert len(reports(hung)) == 1
    assert hung.told("weights") == []
    memory = Path("/dev/shm").glob("lightning-faulttolerant-*")
    assert [name for name in memory for beat in read_heartbeats(name) if str(tmp_path) in beat.directory] == []
    again = begin(tmp_path, *words, options=None, flags=flags, PL_FAULT_TOLERANT_TRAINING="1").wait()
    assert again.exit_code == 0, again.output
    assert again.told("weights") == undisturbed()


def test_a_report_leaves_the_process_alone(tmp_path: Path) -> None:
    """``HangWatch.action=report`` writes what hangs, once, and the script continues when it can."""
    flags = f"{SHORT}, HangWatch.action=report"
    trial = begin(tmp_path, "--flaw", "SIGSTOP", options=None, flags=flags, PL_FAULT_TOLERANT_TRAINING="1")
    while not list(tmp_path.glob("autosaves/*/hang-*.txt")):
        time.sleep(0.05)
    time.sleep(1)
    assert trial.process.poll() is None
    os.kill(trial.steps()[0][0], signal.SIGCONT)
    finished = trial.wait()
    assert (finished.exit_code, finished.num_starts, len(reports(finished))) == (0, 1, 1), finished.output
    assert finished.told("weights") == undisturbed()
