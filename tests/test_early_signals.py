"""SLURM's notice before a fit is recorded if a fit may follow, and ends the process if none does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping

import pytest

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}
NOTICE = "os.kill(os.getpid(), signal.SIGUSR1)"


def run(*lines: str, environment: Mapping[str, str] = SLURM) -> subprocess.CompletedProcess[str]:
    """Run lines of Python in a separate process."""
    return subprocess.run(
        [sys.executable, "-c", "\n".join(["import os, signal, sys, time, threading", *lines])],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


IMPORT = "import lightning_faulttolerant"
SOON = (
    "from lightning_faulttolerant import early_signals; "
    "early_signals._WAIT_SECONDS = early_signals._STUCK_WAIT_SECONDS = 0.2"
)


def test_notice_is_noted_and_ends_the_process_if_no_fit_follows() -> None:
    """The script continues until a fit could begin; then the signal ends it as it would have without us."""
    ended = run(IMPORT, SOON, NOTICE, "print('continues', flush=True)", "time.sleep(30)")
    assert ended.returncode == -10
    assert ended.stdout == "continues\n"
    assert "SIGUSR1 arrived before fit" in ended.stderr
    assert "the job is not queued again. No fit has begun" in ended.stderr


# The main thread waits in C for ever, as in the rendezvous for a rank that is gone.
CALLBACK = "early_signals.EARLY.begin(os.environ, fit_follows=True)"
SHORT = "early_signals._STUCK_SECONDS = 0.3"
STUCK = (
    "import ctypes; lock = ctypes.CDLL(None).pthread_mutex_lock; mutex = ctypes.create_string_buffer(64)",
    "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start(); lock(mutex); lock(mutex)",
)


def test_notice_ends_a_process_that_waits_in_c() -> None:
    """No handler of Python runs there: a thread notes the notice, and ends the process if no fit begins."""
    ended = run(IMPORT, SOON, SHORT, CALLBACK, *STUCK)
    assert ended.returncode == 138
    assert "SIGUSR1 arrived before fit" in ended.stderr
    assert "The main thread has handled no signal" in ended.stderr


def test_script_that_ends_before_a_fit_ends_as_it_does() -> None:
    """A script that ends in time keeps its exit code."""
    assert run(IMPORT, NOTICE, "sys.exit(3)").returncode == 3


def test_fit_has_the_end_of_the_job_to_begin() -> None:
    """If SLURM says when the job ends, a fit has until then to begin."""
    soon = {**SLURM, "SLURM_JOB_END_TIME": str(int(time.time()) + 12)}
    began = time.monotonic()
    ended = run(IMPORT, NOTICE, "time.sleep(30)", environment=soon)
    assert ended.returncode == -10
    assert time.monotonic() - began < 8


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**SLURM, "SLURM_JOB_NAME": "interactive"},
        {**SLURM, "PL_FAULT_TOLERANT_TRAINING": "0"},
        {**SLURM, "TORCHELASTIC_RUN_ID": "1"},
    ],
)
def test_elsewhere_the_signal_keeps_its_effect(environment: Mapping[str, str]) -> None:
    """Outside a job that Lightning would requeue, or if the package is switched off, the signal is not handled."""
    ended = run(IMPORT, NOTICE, "print('continues')", environment=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-10, "", "")


@pytest.mark.parametrize("own", ["signal.SIG_IGN", "lambda *_: print('own')"])
def test_handler_of_the_script_stays(own: str) -> None:
    """A handler that was set before the import stays, and one that is set later replaces ours."""
    show = "print(signal.getsignal(signal.SIGUSR1) is own)"
    assert run(f"own = {own}", "signal.signal(signal.SIGUSR1, own)", IMPORT, show).stdout == "True\n"
    late = [IMPORT, f"own = {own}", "signal.signal(signal.SIGUSR1, own)"]
    give_back = "from lightning_faulttolerant.early_signals import EARLY; EARLY.give_back()"
    assert run(*late, give_back, show).stdout == "True\n"


def test_child_that_was_forked_ends_at_once() -> None:
    """A process that the script forks before its fit ends as it would have, and prints nothing."""
    fork = ["child = os.fork()", f"if not child: {NOTICE}; os._exit(0)", "print(os.waitpid(child, 0)[1])"]
    ended = run(IMPORT, *fork)
    assert (ended.stdout, ended.stderr) == ("10\n", "")
    quiet = "import warnings; warnings.simplefilter('ignore')"  # Python >= 3.12 warns of a fork beside a thread
    ended = run(quiet, IMPORT, SOON, SHORT, CALLBACK, *fork, "time.sleep(1)")  # the parent has got none
    assert (ended.stdout, ended.stderr) == ("10\n", "")


def test_command_line_ends_at_once() -> None:
    """The command line, which trains nothing, ends immediately."""
    ended = run(
        "from lightning_faulttolerant import cli",
        "from lightning_faulttolerant.early_signals import EARLY",
        NOTICE,
        "cli.main(['list'])",
    )
    assert ended.returncode == -10
    assert "No fit with FaultTolerance" in ended.stderr
