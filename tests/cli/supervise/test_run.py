"""Real runs under supervision: each ends by itself, with the weights of the undisturbed script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.cli.run import OTHERS_ENDED
from lightning_faulttolerant.processes import is_running
from tests.cli.supervise.supervised import RUN, RunningTrial, begin, supervised, undisturbed
from tests.cli.supervise.training import NUM_BATCHES, NUM_EPOCHS

pytestmark = pytest.mark.timeout(240)


def wait_for_steps(trial: RunningTrial, number: int) -> None:
    """Wait until a script has trained so many steps."""
    while len(trial.steps()) < number:
        assert trial.process.poll() is None
        time.sleep(0.01)


def test_a_script_that_fails_once_finishes_as_if_it_had_not(tmp_path: Path) -> None:
    """The exception is told, the second start continues, and the script sees no ranks that it did not ask for."""
    trial = supervised(tmp_path, "--flaw", "exception")
    assert (trial.exit_code, trial.num_starts) == (0, 2), trial.output
    assert trial.told("weights") == undisturbed()
    assert len(trial.told("steps")) == NUM_EPOCHS * NUM_BATCHES + 1
    assert "start 1: Ended by ValueError: this batch can't be trained, in batch 5 of epoch 0 on rank 0" in trial.output
    assert trial.told("environment") == [{"RANK": None, "WORLD_SIZE": None}]


def test_without_supervision_the_same_script_fails(tmp_path: Path) -> None:
    """The negative control: alone, the script trains no further than to its exception."""
    trial = begin(tmp_path, "--flaw", "exception", options=None, PL_FAULT_TOLERANT_TRAINING="1").wait()
    assert (trial.exit_code, len(trial.told("steps")), trial.told("weights")) == (1, 6, [])


def test_the_requests_reach_the_script(tmp_path: Path) -> None:
    """What the options ask for, the script reads from its environment."""
    code = "import os; print([os.environ[f'PL_FAULT_TOLERANT_{n}'] for n in ('RESUME_FROM', 'SKIP_BATCHES', 'ACCEPT')])"
    options = ["--from", "40", "--skip", "4:2", "--skip", "0:43", "--accept", "a.b", "--accept", "c"]
    ended = subprocess.run(
        [sys.executable, *RUN, *options, "--", sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "['40', '0:43,4:2', 'a.b,c']" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("flaw", ["os._exit", "SIGKILL"])
def test_a_process_that_vanishes_is_started_again(tmp_path: Path, flaw: str) -> None:
    """A process that can tell nothing continues, too."""
    trial = supervised(tmp_path, "--flaw", flaw)
    assert (trial.exit_code, trial.num_starts) == (0, 2), trial.output
    assert trial.told("weights") == undisturbed()


@pytest.mark.slow
def test_the_same_exception_three_times_ends_the_run(tmp_path: Path) -> None:
    """The message names the batch, its samples, and the exception; the exit code is documented."""
    trial = supervised(tmp_path, "--flaw", "exception", "--how", "always")
    assert (trial.exit_code, trial.num_starts) == (3, 3), trial.output
    [line] = [line for line in trial.output.splitlines() if "3 starts in a row" in line]
    assert "in batch 5 of epoch 0, on rank 0: ValueError: this batch can't be trained." in line
    assert "Its samples are train/0: " in line
    assert trial.told("weights") == []


@pytest.mark.slow
def test_an_exception_that_wanders_is_no_loop(tmp_path: Path) -> None:
    """The same exception at other batches is restarted, as long as there are new autosaves."""
    trial = supervised(
        tmp_path, "--flaw", "exception", "--how", "wandering", "--at", "11", options=("--max-restarts", "1")
    )
    assert (trial.exit_code, trial.num_starts) == (0, 6), trial.output
    assert trial.told("weights") == undisturbed()


@pytest.mark.slow
def test_a_script_that_never_trains_is_given_up(tmp_path: Path) -> None:
    """Without any autosave, the run ends after the number of starts that was asked for."""
    trial = supervised(tmp_path, "--flaw", "import error", options=("--max-restarts", "2"))
    assert trial.exit_code == 4, trial.output
    assert trial.output.count("ImportError: no such module") == 2
    assert "2 starts in a row ended without a new autosave; the last one by exit code 1" in trial.output


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_stops_the_run_with_an_autosave(tmp_path: Path, signum: signal.Signals) -> None:
    """The signal is passed on; the next run of the same command continues, and nothing is trained twice."""
    words = ("--how", "always", "--flaw", "short sleep")
    trial = begin(tmp_path, *words)
    wait_for_steps(trial, 3)
    os.kill(trial.process.pid, signum)
    stopped = trial.wait()
    assert stopped.exit_code == 128 + signum, stopped.output
    assert stopped.told("weights") == []
    finished = supervised(tmp_path, *words)
    assert finished.exit_code == 0, finished.output
    assert finished.told("weights") == undisturbed()
    assert len(finished.told("steps")) == NUM_EPOCHS * NUM_BATCHES


def test_a_state_that_could_not_be_saved_is_reported(tmp_path: Path) -> None:
    """The command that is stopped ends with the code of its script, not with that of the signal."""
    sleeps = "[time.sleep(0.1) for _ in range(600)]"  # a signal just before one long sleep would not end it
    script = f"import signal, sys, time; signal.signal(15, lambda *_: sys.exit(74)); open('ready', 'w'); {sleeps}"
    trial = RunningTrial(tmp_path, (*RUN, "--", sys.executable, "-c", script), {})
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    os.kill(trial.process.pid, signal.SIGTERM)
    stopped = trial.wait()
    assert stopped.exit_code == 74, stopped.output


def begin_shell(directory: Path, script: str) -> RunningTrial:
    """Run a script of the shell, which tells its process id and the directory of the supervisor."""
    # torch fills in templates: two dollars become one.
    told = 'echo "[$$$$, \\"$PL_FAULT_TOLERANT_SUPERVISOR\\"]" > told.jsonl'
    return RunningTrial(directory, (*RUN, "--shutdown-timeout", "1", "--", "sh", "-c", f"{told}; {script}"), {})


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_further_signals_do_not_save_the_processes_from_their_end(tmp_path: Path, signum: signal.Signals) -> None:
    """A script that ignores them is killed when its time is over, however many signals come until then."""
    trial = begin_shell(tmp_path, "trap '' TERM INT; touch ready; while true; do sleep 0.1; done")
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    while trial.process.poll() is None:
        os.kill(trial.process.pid, signum)
        time.sleep(0.05)
    stopped = trial.wait()
    [[process_id, directory]] = stopped.told("told")
    assert stopped.exit_code == 128 + signum, stopped.output
    assert not is_running(process_id)
    assert not Path(directory).exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_in_the_first_moment_of_a_start_ends_all(tmp_path: Path, signum: signal.Signals) -> None:
    """It is neither lost, nor does it leave a process or the directory: the guard is there before the process is."""
    stopped = begin_shell(tmp_path, f"kill -{signum.value} $PPID; while true; do sleep 0.1; done").wait()
    [[process_id, directory]] = stopped.told("told")
    assert stopped.exit_code == (-signum if signum == signal.SIGKILL else 128 + signum), stopped.output
    while is_running(process_id) or Path(directory).exists():
        time.sleep(0.02)


@pytest.mark.slow
def test_a_script_that_is_stopped_itself_is_not_started_again(tmp_path: Path) -> None:
    """A scheduler may signal the script and not the command; the run ends with the script's code all the same."""
    trial = begin(tmp_path, "--how", "always", "--flaw", "short sleep")
    wait_for_steps(trial, 3)
    os.kill(trial.steps()[0][0], signal.SIGTERM)
    stopped = trial.wait()
    assert stopped.exit_code == 143, stopped.output
    assert "start 1: The run is stopped by SIGTERM." in stopped.output


@pytest.mark.slow
def test_two_ranks_are_started_again_together(tmp_path: Path) -> None:
    """An exception on one rank ends both, its cause is told, and the run equals torchrun's undisturbed one."""
    options = ("--nproc-per-node", "2")
    trial = supervised(tmp_path, "--flaw", "exception", "--rank", "1", options=options)
    assert (trial.exit_code, trial.num_starts) == (0, 4), trial.output
    assert trial.told("weights") == undisturbed(2)
    assert "in batch 5 of epoch 0 on rank 1" in trial.output


@pytest.mark.slow
def test_two_machines_are_started_again_together(tmp_path: Path) -> None:
    """Two commands that meet at one address run one rank each, and both finish after an exception on the second."""
    port = 20_000 + os.getpid() % 10_000
    options = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "one")
    trials = [begin(tmp_path, "--flaw", "exception", "--rank", "1", options=options, output=name) for name in "ab"]
    ended = [trial.wait() for trial in trials]
    assert [trial.exit_code for trial in ended] == [0, 0], "".join(trial.output for trial in ended)
    assert ended[0].told("weights") == undisturbed(2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_the_other_machine_ends_with_a_message(tmp_path: Path, number: int) -> None:
    """One machine gives up, the one at whose address they meet or another one; the other one says so, and ends."""
    port = 20_000 + os.getpid() % 10_000
    meet = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "one")
    trials = []
    for each in range(2):
        options = (*meet, "--max-restarts", "1" if each == number else "5")
        trials.append(begin(tmp_path, "--flaw", "import error", options=options, output=f"machine-{each}"))
        time.sleep(1)  # the first one is to listen
    ended = [trial.wait() for trial in trials]
    output = "".join(trial.output for trial in ended)
    assert [trial.exit_code for trial in ended] == [4, 4], output
    gave_up, other = ended[number].output, ended[1 - number].output
    assert "A start ended without a new autosave" in gave_up, output
    assert OTHERS_ENDED in other, output
    assert "launch_agent" not in other, f"torch's traceback: {output}"


def test_what_can_not_be_started_is_wrong_usage(tmp_path: Path) -> None:
    """A command that does not exist, and a number that is none, give status 2 before anything is started."""
    missing = RunningTrial(tmp_path / "a", ("-m", "lightning_faulttolerant", "run", "--", "no-such-program"), {}).wait()
    assert missing.exit_code == 2
    assert "lightning-faulttolerant run: no-such-program: no such command" in missing.output
    for number, options in enumerate([("--max-restarts", "0"), ("--nnodes", "2")]):
        words = ("-m", "lightning_faulttolerant", "run", *options, "--", "true")
        assert RunningTrial(tmp_path / str(number), words, {}).wait().exit_code == 2
