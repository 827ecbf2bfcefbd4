"""`assert_resumes_exactly` counts what an interruption costs, also in a plain script; its processes end or tell why."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly, processes
from lightning_faulttolerant.testing.processes import run_ranks
from tests.harness import python
from tests.runs import fit_net

ROOT = Path(__file__).parents[2]
_SCRIPT = """
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.runs import fit_net

print(assert_resumes_exactly(fit_net, [KillAt(4)], options={"every_n_train_steps": 1}))
"""


def test_runs_of_a_plain_script_do_not_find_each_other(tmp_path: Path) -> None:
    """A script must get the cost of its interruption, and then find nothing else in its directory."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = python.Command(
        words=[sys.executable, str(script)],
        directory=str(tmp_path),
        environment=environment | {"PWD": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    exit_code, output = python.run(command, scratch=tmp_path.parent / f"{tmp_path.name}-output")
    assert exit_code == 0, output
    assert output.count("Interruption(") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_killed_in_the_middle_of_an_epoch() -> None:
    """A run that is killed in the middle of an epoch continues exactly."""
    [cost] = assert_resumes_exactly(fit_net, [KillAt(4)], options={"every_n_train_steps": 1})
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (-9, 0, 4, 1)


class Fails(Callback):
    num_begun = 0

    def on_train_batch_start(self, *_):
        self.num_begun += 1
        assert self.num_begun < 3


def test_a_fault_counts_what_happens_in_its_process() -> None:
    """A user's callback that interrupts a run does not continue with it."""
    costs = assert_resumes_exactly(fit_net, [Fails(), Fails()], options={"every_n_train_steps": 1})
    assert [cost.batch for cost in costs] == [2, 4]


# The processes of the ranks: how long they may take, and what a process that does not end reports


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
