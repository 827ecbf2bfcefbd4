"""A supervised run ends by itself with the weights of the undisturbed run, whatever fault comes, and whenever.

By default, each kind of `KINDS` comes once. `make faults` lets each come at each of its moments, on one rank and on
two. `--fault-trials` and `--fault-seed` set the number of trials and the seed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.supervise.fault_kinds import KINDS
from tests.cli.supervise.supervised import begin, undisturbed
from tests.cli.supervise.training import HOOKS, Plan

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@dataclass(frozen=True)
class FaultTrial:
    """A fault that comes at a moment, on one of several ranks; all else is drawn from the seed."""

    kind: str
    moment: str
    num_ranks: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.moment}-{self.num_ranks}-{self.seed}"

    def plan(self) -> tuple[Plan, str]:
        """Return the arguments of the script, and those of the callback."""
        draw = random.Random(str(self))
        kind = KINDS[self.kind]
        hook = draw.choice([*HOOKS[self.moment]])
        place = {"hook": hook, "number": draw.randrange(HOOKS[self.moment][hook])}
        workers = draw.choice([0, 0, 0, 2]) if kind.num_workers is None else kind.num_workers
        # On a busy machine, a start may take some seconds.
        flags = f", async_save={draw.choice(['true', 'false'])}, HangWatch.timeout=10"
        rank = draw.randrange(self.num_ranks)
        return Plan(num_workers=workers, **place, kind=self.kind, seed=self.seed, rank=rank), flags


def draw_trials(number: int, seed: int) -> list[FaultTrial]:
    """Return at least this many trials, of all kinds in turn; in enough of them, each comes at each moment."""
    cases = {}
    for name, kind in KINDS.items():
        found = list(itertools.product(kind.moments, kind.num_ranks))
        random.Random(f"{seed} {name}").shuffle(found)
        cases[name] = itertools.cycle(found)
    trials: list[FaultTrial] = []
    while len(trials) < max(number, 1):
        for name, in_turn in cases.items():
            trials.append(FaultTrial(name, *next(in_turn), seed + len(trials)))
    return trials


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the trials."""
    number, seed = (metafunc.config.getoption(name) for name in ("--fault-trials", "--fault-seed"))
    metafunc.parametrize("trial", draw_trials(number, seed), ids=str)


def test_trial(trial: FaultTrial, tmp_path: Path) -> None:
    """The run ends by itself, also if it has to be started again after a request to stop, and leaves no process."""
    kind = KINDS[trial.kind]
    plan, flags = trial.plan()
    options = ("--nproc-per-node", str(trial.num_ranks)) if trial.num_ranks > 1 else ()  # one is started as if by hand
    (tmp_path / "autosaves").mkdir()
    ended = [begin(tmp_path, plan, options=options, flags=flags).wait()]
    if ended[0].exit_code in kind.ends:
        ended.append(begin(tmp_path, plan, options=options, flags=flags, output="again").wait())
    told = f"{plan}\n{flags}\n" + "\n=== ".join(f"{each.exit_code}\n{each.output}" for each in ended)
    assert ended[-1].exit_code == 0, told
    assert (tmp_path / "struck").exists(), f"The fault did not come.\n{told}"
    weights = ended[-1].told("weights")
    assert weights, told
    assert all([found] == undisturbed(trial.num_ranks, plan.num_workers) for found in weights), told
