"""The processes of the ranks: how long they may take, and what a process that does not end reports."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("killed", [0, 1])
def test_the_signal_is_the_cause_where_another_fails_before_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    """A rank with a killed neighbor ends with its own exit code, maybe before the next check."""
    until_after_the_first_check, until_all_have_ended = 0.3, 1.0
    monkeypatch.setattr(processes.time, "sleep", lambda seconds, sleep=time.sleep: sleep(until_all_have_ended))

    def main(rank: int) -> None:
        threading.Event().wait(until_after_the_first_check)
        if rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(1)

    outputs = [tmp_path / "0.txt", tmp_path / "1.txt"]
    assert run_ranks(main, outputs=outputs, seed=1, timeout_seconds=30) == -signal.SIGKILL


def test_a_logger_prints_into_the_output_of_its_process(tmp_path: Path) -> None:
    """A handler that has kept the stream of its creation prints into the output of the forked process."""
    logger = logging.getLogger("tests.processes")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    try:
        output = tmp_path / "0.txt"
        assert run_ranks(lambda _: logger.warning("printed"), outputs=[output], seed=1, timeout_seconds=30) == 0
    finally:
        logger.removeHandler(handler)
    assert output.read_text() == "printed\n"


def test_the_seed_of_a_process_is_that_of_manual_seed(tmp_path: Path) -> None:
    """The generator of torch in a forked process draws what it draws after `torch.manual_seed`."""
    output = tmp_path / "0.txt"
    assert run_ranks(lambda _: print(torch.rand(2).tolist()), outputs=[output], seed=7, timeout_seconds=30) == 0
    expected = torch.rand(2, generator=torch.Generator().manual_seed(7)).tolist()
    assert output.read_text() == f"{expected}\n"
