"""A supervised run ends by itself with the weights of the undisturbed run, whatever fault comes, and whenever.

By default, each kind of `KINDS` comes once. `make faults` lets each come at each of its moments, on one rank and on
two. `--fault-trials` and `--fault-seed` set the number of trials and the seed.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cli.supervise.fault_kinds import KINDS
from tests.cli.supervise.fault_trials import SCRIPT, Attempt, FaultTrial, draw_trials
from tests.cli.supervise.faulty_training import Plan
from tests.cli.supervise.own_mounts import can_mount
from tests.cli.supervise.supervised import RunningTrial
from tests.scripts import told

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the trials."""
    if "trial" in metafunc.fixturenames:
        number, seed = metafunc.config.getoption("--fault-trials"), metafunc.config.getoption("--fault-seed")
        metafunc.parametrize("trial", draw_trials(number, seed), ids=str)


def can_be_tried(trial: FaultTrial) -> bool:
    """Return whether this system allows the mounts that a trial needs."""
    return not KINDS[trial.kind].mounts or can_mount()


@functools.cache
def undisturbed(num_ranks: int, num_workers: int) -> object:
    """Return the final weights of the script, without the callback and without supervision."""
    with tempfile.TemporaryDirectory() as name:
        plan = Plan(directory=name, num_ranks=num_ranks, num_workers=num_workers)
        words = (str(SCRIPT), json.dumps(asdict(plan)))
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
        ended = RunningTrial(Path(name), words if num_ranks == 1 else (*torchrun, *words), {}).wait()
        assert ended.exit_code == 0, ended.output
        [weights] = told(Path(name), "weights")
        return weights


def test_trial(trial: FaultTrial, request: pytest.FixtureRequest) -> None:
    """The run ends by itself, also if it has to be started again after a request to stop, and leaves no process."""
    if not can_be_tried(trial):
        pytest.skip("mounts a small file system, which this system does not allow")
    attempt = Attempt(trial=trial)
    wrong = attempt.finish(undisturbed(trial.num_ranks, attempt.plan.num_workers))
    number, seed = (request.config.getoption(name) for name in ("--fault-trials", "--fault-seed"))
    again = f"python -m pytest '{request.node.nodeid}' --fault-trials={number} --fault-seed={seed}"
    assert not wrong, f"{trial.kind} in {trial.moment} on {trial.num_ranks} ranks, again by:\n{again}\n{wrong}"
