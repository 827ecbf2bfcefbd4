"""Real runs under supervision: each ends by itself, with the weights of the undisturbed script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.cli.run import OTHERS_ENDED
from lightning_faulttolerant.processes import is_running
from tests.cli.supervise.supervised import RUN, RunningTrial, Trial, begin, undisturbed
from tests.cli.supervise.training import NUM_BATCHES, NUM_EPOCHS, Plan
from tests.ledgers import chapter_of

pytestmark = pytest.mark.timeout(300)
RAISES = Plan(kind="exception")
TICKS = Plan(seconds=0.2)  # the process ends 0.3 s after the jump, and has to be in its training then
IMPORT_ERROR = Plan(kind="import error")
SHORT = ", HangWatch.timeout=5"


def wait_for(trial: RunningTrial, has_come: Callable[[], object]) -> None:
    """Wait until something has come, which a run that has ended can't bring."""
    while not has_come():
        assert trial.process.poll() is None
        time.sleep(0.01)


def assert_finished(trial: Trial, num_ranks: int = 1, num_workers: int = 0, *, num_starts: int | None = None) -> None:
    """Check that a run has ended with the weights of the undisturbed run."""
    assert trial.exit_code == 0, trial.output
    assert trial.told("weights") == undisturbed(num_ranks, num_workers)
    assert num_starts in (None, trial.num_starts), trial.output


def test_the_requests_reach_the_script(tmp_path: Path) -> None:
    """What the options ask for, the script reads from its environment."""
    code = "import os; print([os.environ[f'PL_FAULT_TOLERANT_{n}'] for n in ('RESUME_FROM', 'SKIP_BATCHES', 'ACCEPT')])"
    options = ["--from", "40", "--skip", "4:2", "--skip", "0:43", "--accept", "a.b", "--accept", "c"]
    words = [sys.executable, *RUN, *options, "--", sys.executable, "-c", code]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "['40', '0:43,4:2', 'a.b,c']" in ended.stdout


SAME = "in batch 3 of epoch 0, on rank 0: ValueError: an exception."
NEVER = "2 starts in a row ended without a new autosave; the last one by exit code 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "options", "exit_code", "num_starts", "said"),
    [
        (replace(RAISES, always=True), (), 3, 3, ("3 starts in a row", SAME, "Its samples are train/0: ")),
        (IMPORT_ERROR, ("--max-restarts", "2"), 4, 0, ("ImportError: no such module", NEVER)),
    ],
    ids=["the same exception", "it never trains"],
)
def test_a_run_that_gets_no_further_is_given_up(
    plan: Plan, options: tuple[str, ...], exit_code: int, num_starts: int, said: tuple[str, ...], tmp_path: Path
) -> None:
    """The message names the batch, its samples, and the exception; the exit codes are documented."""
    trial = begin(tmp_path, plan, options=options).wait()
    assert (trial.exit_code, trial.num_starts, trial.told("weights")) == (exit_code, num_starts, []), trial.output
    assert all(text in trial.output for text in said), trial.output


# The script's plan, and the number of ranks.
FAULTS: dict[str, tuple[Plan, int]] = {
    "SIGKILL in the setup": (Plan(kind="SIGKILL", hook="on_fit_start", number=0), 1),
    "SIGKILL while another rank saves, too": (Plan(kind="SIGKILL", hook="on_save_checkpoint", rank=1), 2),
    "an exception in a validation run": (Plan(kind="exception", hook="on_validation_batch_start", rank=1), 2),
    "an exit with 0": (Plan(kind="exit with 0"), 1),
    "a hang in the teardown": (Plan(kind="SIGSTOP", hook="on_train_end"), 1),
    "a killed worker": (Plan(kind="killed worker", num_workers=2), 1),
    "a file system that blocks": (Plan(kind="file system that blocks"), 1),
    "a clock that jumps ahead": (replace(TICKS, kind="clock that jumps ahead"), 1),
    "a clock that jumps back": (replace(TICKS, kind="clock that jumps back"), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS)
def test_whatever_comes_the_run_ends_by_itself(case: str, tmp_path: Path) -> None:
    """It has the weights of the undisturbed run, and leaves no process, at whatever moment the fault comes."""
    plan, num_ranks = FAULTS[case]
    options = ("--nproc-per-node", "2") if num_ranks > 1 else ()
    trial = begin(tmp_path, plan, options=options, flags=", HangWatch.timeout=10").wait()
    assert_finished(trial, num_ranks, plan.num_workers)
    assert (tmp_path / "struck").exists()


@pytest.mark.parametrize(
    "signum", [None, *(pytest.param(signum, marks=pytest.mark.slow) for signum in (signal.SIGTERM, signal.SIGINT))]
)
def test_a_script_that_fails_or_is_stopped_finishes(tmp_path: Path, signum: signal.Signals | None) -> None:
    """An exception starts it again; after a signal, the next run of the same command continues. It sees no ranks."""
    plan = replace(RAISES, number=7, seconds=0.1)
    if signum is not None:
        trial = begin(tmp_path, plan)
        wait_for(trial, lambda: len(trial.steps()) > 2)
        os.kill(trial.process.pid, signum)
        stopped = trial.wait()
        assert (stopped.exit_code, stopped.told("weights")) == (128 + signum, []), stopped.output
    finished = begin(tmp_path, plan).wait()
    assert_finished(finished, num_starts=2 if signum is None else 3)
    assert len(finished.told("steps")) == NUM_EPOCHS * NUM_BATCHES + 1
    assert "start 1: Ended by ValueError: an exception, in batch 2 of epoch 1 on rank 0" in finished.output
    assert finished.told("environment") == [[None, None]]


def test_a_state_that_could_not_be_saved_is_reported(tmp_path: Path) -> None:
    """The command that is stopped ends with the code of its script, not with that of the signal."""
    sleeps = "[time.sleep(0.1) for _ in range(600)]"  # a signal just before one long sleep would not end it
    # Not open(), whose file would swallow an exit out of the handler while it is closed.
    script = f"import os, signal, sys, time; signal.signal(15, lambda *_: sys.exit(74)); os.mkdir('ready'); {sleeps}"
    trial = RunningTrial(tmp_path, (*RUN, "--", sys.executable, "-c", script))
    wait_for(trial, (tmp_path / "ready").exists)
    os.kill(trial.process.pid, signal.SIGTERM)
    assert trial.wait().exit_code == 74


def begin_shell(directory: Path, script: str) -> RunningTrial:
    """Run a script of the shell, which tells its process id and the directory of the supervisor."""
    told = 'echo "[$$$$, \\"$PL_FAULT_TOLERANT_SUPERVISOR\\"]" > told.jsonl'  # torch makes one dollar of two
    return RunningTrial(directory, (*RUN, "--shutdown-timeout", "1", "--", "sh", "-c", f"{told}; {script}"))


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_further_signals_do_not_save_the_processes_from_their_end(tmp_path: Path, signum: signal.Signals) -> None:
    """A script that ignores them is killed when its time is over, however many signals come until then."""
    trial = begin_shell(tmp_path, "trap '' TERM INT; touch ready; while true; do sleep 0.1; done")
    wait_for(trial, (tmp_path / "ready").exists)
    while trial.process.poll() is None:
        os.kill(trial.process.pid, signum)
        time.sleep(0.05)
    stopped = trial.wait()
    [[process_id, directory]] = stopped.told("told")
    assert stopped.exit_code == 128 + signum, stopped.output
    assert (is_running(process_id), Path(directory).exists()) == (False, False)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_the_first_moment_of_a_start_ends_all(tmp_path: Path, signum: signal.Signals) -> None:
    """It is neither lost, nor does it leave a process or the directory: the guard is there before the process is."""
    stopped = begin_shell(tmp_path, f"kill -{signum.value} $PPID; while true; do sleep 0.1; done").wait()
    [[process_id, directory]] = stopped.told("told")
    assert stopped.exit_code == (-signum if signum == signal.SIGKILL else 128 + signum), stopped.output
    while is_running(process_id) or Path(directory).exists():
        time.sleep(0.02)


def test_what_can_not_be_started_is_wrong_usage(tmp_path: Path) -> None:
    """A command that does not exist, and a number that is none, give status 2 before anything is started."""
    for options, word in ((), "no-such-program"), (("--max-restarts", "0"), "true"), (("--nnodes", "2"), "true"):
        ended = RunningTrial(tmp_path, (*RUN, *options, "--", word)).wait()
        assert ended.exit_code == 2
        assert options or "lightning-faulttolerant run: no-such-program: no such command" in ended.output


# Several machines.


def meeting(number: int) -> tuple[str, ...]:
    """Return the options of two commands that meet at one address."""
    port = 20_000 + number * 10_000 + os.getpid() % 10_000
    return "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "one"


@pytest.mark.slow
def test_two_machines_are_started_again_together(tmp_path: Path) -> None:
    """Two commands that meet at one address run one rank each, and both finish after an exception on the second."""
    trials = [begin(tmp_path, replace(RAISES, rank=1), options=meeting(0), output=name) for name in "ab"]
    ended = [trial.wait() for trial in trials]
    for trial in ended:
        assert_finished(trial, 2)
    assert "in batch 3 of epoch 0 on rank 1" in "".join(trial.output for trial in ended)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_other_machine_ends_with_a_message(tmp_path: Path, number: int) -> None:
    """One machine gives up, the one at whose address they meet or another one; the other one says so, and ends."""
    trials = []
    for each in range(2):
        options = (*meeting(1), "--max-restarts", "1" if each == number else "5")
        trials.append(begin(tmp_path, IMPORT_ERROR, options=options, output=f"machine-{each}"))
        time.sleep(1)  # the first one is to listen
    gave_up, other = (trials[each].wait() for each in (number, 1 - number))
    assert (gave_up.exit_code, other.exit_code) == (4, 4)
    assert "A start ended without a new autosave" in gave_up.output
    assert OTHERS_ENDED in other.output
    assert "launch_agent" not in other.output, f"torch's traceback: {other.output}"


# Processes that hang.


def reports(trial: Trial) -> list[str]:
    """Return the reports of hangs next to the autosaves."""
    return [path.read_text() for path in sorted(trial.directory.glob("autosaves/*/hang-*.txt"))]


# The script's plan, and what the report says.
HUNG: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "SIGSTOP": (Plan(kind="SIGSTOP"), ("(epoch 0, batch 3)", "stopped by a signal")),
    "GIL": (Plan(kind="GIL"), ("(epoch 0, batch 3)", "in come")),
    "worker": (Plan(kind="worker deadlock", num_workers=2), ("in _try_get_data", "in __getitem__")),
    "rank": (Plan(kind="rank without collective", rank=1), ("The others wait in a collective for rank 1.",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HUNG)
def test_a_hung_process_is_started_again(tmp_path: Path, case: str) -> None:
    """It is noticed though no Python runs in it; the report says where it was, with its stack if it has one."""
    (plan, said), num_ranks = HUNG[case], 2 if case == "rank" else 1
    trial = begin(tmp_path, plan, options=("--nproc-per-node", "2") if num_ranks > 1 else (), flags=SHORT).wait()
    assert_finished(trial, num_ranks, plan.num_workers, num_starts=2 * num_ranks)
    [report] = reports(trial)
    assert all(text in report for text in said), report
    hangs = {process.hang for process in chapter_of(trial.directory / "autosaves").processes} - {None}
    assert [4 < hang[1] - hang[0] < 30 for hang in hangs if hang] == [True]  # the next start has told of it
    assert "See " in trial.output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGSTOP", "GIL"])
def test_without_run_a_hung_process_ends_with_a_documented_code(tmp_path: Path, kind: str) -> None:
    """``HangWatch`` starts its own watcher; the same command continues, and no process is left."""
    more: dict[str, Any] = {"options": None, "flags": f"{SHORT}, HangWatch.action=stop"}
    hung = begin(tmp_path, Plan(kind=kind), **more).wait()
    assert (hung.exit_code, len(reports(hung)), hung.told("weights")) == (60, 1, []), hung.output
    assert_finished(begin(tmp_path, Plan(kind=kind), **more).wait())


@pytest.mark.slow
def test_a_report_leaves_the_process_alone(tmp_path: Path) -> None:
    """``HangWatch.action=report`` writes what hangs, once, and the script continues when it can."""
    trial = begin(tmp_path, Plan(kind="SIGSTOP"), options=None, flags=f"{SHORT}, HangWatch.action=report")
    wait_for(trial, lambda: list(tmp_path.glob("autosaves/*/hang-*.txt")))
    time.sleep(1)
    assert trial.process.poll() is None
    os.kill(trial.steps()[0][0], signal.SIGCONT)
    finished = trial.wait()
    assert_finished(finished, num_starts=1)
    assert len(reports(finished)) == 1
