"""The processes of the ranks: how long they may take, and what a process that does not end reports."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_faulttolerant.testing import processes
from lightning_faulttolerant.testing.processes import run_ranks


def wait_in_the_worker() -> None:
    """Wait for an event that never comes."""
    time.sleep(60)


def wait_in_the_rank(worker: int) -> None:
    """Wait for a worker that never ends."""
    os.waitpid(worker, 0)


def test_those_that_do_not_end_tell_where_they_are(tmp_path: Path) -> None:
    """Every rank, and every worker of a rank, prints its stack before it is killed."""

    def main(rank: int) -> None:
        worker = os.fork()
        if worker == 0:
            wait_in_the_worker()
        wait_in_the_rank(worker)

    outputs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    with pytest.raises(TimeoutError, match="within 4 seconds"):
        run_ranks(main, outputs=outputs, seed=1, timeout_seconds=4)
    for output in outputs:
        printed = output.read_text()
        assert "in wait_in_the_rank" in printed
        assert "in wait_in_the_worker" in printed


def test_a_machine_that_stood_still_is_not_held_against_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by an hour while no process ran does not end a run."""
    pauses = itertools.chain([0.0, 0.0, 3600.0, 3600.0], itertools.repeat(7200.0))

    def monotonic(now: Callable[[], float] = time.monotonic) -> float:
        return now() + next(pauses)

    def main(rank: int) -> None:
        time.sleep(0.5)

    monkeypatch.setattr(processes.time, "monotonic", monotonic)
    assert run_ranks(main, outputs=[tmp_path / "0.txt"], seed=1, timeout_seconds=30) == 0


@pytest.mark.parametrize("killed", [0, 1])
def test_the_signal_is_the_cause_where_another_fails_before_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    """A rank with a killed neighbor ends with its own exit code, maybe before the next check."""
    until_all_have_ended = 1.0
    monkeypatch.setattr(processes.time, "sleep", lambda seconds, sleep=time.sleep: sleep(until_all_have_ended))

    def main(rank: int) -> None:
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(1)

    outputs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    assert run_ranks(main, outputs=outputs, seed=1, timeout_seconds=30) == -signal.SIGKILL
