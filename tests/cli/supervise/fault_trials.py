"""Trials: a supervised run in which a fault comes at a random moment, and how the run has to end."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.cli.supervise.fault_kinds import KINDS
from tests.cli.supervise.faulty_training import HOOKS, WRITE, Plan
from tests.cli.supervise.supervised import RUN, RunningTrial
from tests.harness import places
from tests.scripts import told

SCRIPT = Path(__file__).with_name("faulty_training.py")
_MOUNT = ("-m", "tests.cli.supervise.own_mounts")
# On a busy machine, a start may take some seconds.
_HANG_SECONDS = 10
_ENDS_WITHIN_SECONDS = 250


@dataclass(frozen=True, kw_only=True)
class FaultTrial:
    """What is tried.

    Args:
        kind: The kind of the fault.
        moment: Its moment.
        num_ranks: The number of ranks.
        seed: All else is drawn from it.
    """

    kind: str
    moment: str
    num_ranks: int
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.moment}-{self.num_ranks}-{self.seed}"

    def plan(self, directory: Path) -> tuple[Plan, str]:
        """Return the arguments of the script, and those of the callback."""
        draw = random.Random(str(self))
        kind = KINDS[self.kind]
        rank = draw.randrange(self.num_ranks)
        hooks = [hook for hook in HOOKS[self.moment] if hook != WRITE or rank == 0]  # rank 0 writes the autosaves
        hook = draw.choice(hooks)
        plan = Plan(
            directory=str(directory),
            num_ranks=self.num_ranks,
            num_workers=draw.choice([0, 0, 0, 2]) if kind.num_workers is None else kind.num_workers,
            kind=self.kind,
            hook=hook,
            number=draw.randrange(HOOKS[self.moment][hook]),
            rank=rank,
            seed=self.seed,
            has_mounts=bool(kind.mounts),
        )
        options = (
            f"every_n_train_steps=1, async_save={draw.choice(['true', 'false'])}, HangWatch.timeout={_HANG_SECONDS}"
        )
        return plan, f"{options}, dirpath={directory / 'autosaves'}"


def draw_trials(number: int, seed: int) -> list[FaultTrial]:
    """Return trials of all kinds in turn; in enough trials, each kind comes at each moment on each number of ranks.

    Args:
        number: How many at least. Each kind comes once in any case.
        seed: The order of the moments depends on it.
    """
    cases = {}
    for name, kind in KINDS.items():
        found = list(itertools.product(kind.moments, kind.num_ranks))
        random.Random(f"{seed} {name}").shuffle(found)
        cases[name] = itertools.cycle(found)
    trials: list[FaultTrial] = []
    while len(trials) < max(number, 1):
        for name, in_turn in cases.items():
            moment, num_ranks = next(in_turn)
            trials.append(FaultTrial(kind=name, moment=moment, num_ranks=num_ranks, seed=seed + len(trials)))
    return trials


@dataclass(kw_only=True)
class Attempt:
    """A trial in progress.

    Args:
        trial: What is tried.
        directory: The directory of the script.
    """

    trial: FaultTrial
    # Not in shared memory: a trial may mount another one over it.
    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="fault-", dir=places.on_disk())))
    outputs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan, self.options = self.trial.plan(self.directory)
        (self.directory / "autosaves").mkdir()
        self.running = self._start()

    def _start(self) -> RunningTrial:
        kind, plan = KINDS[self.trial.kind], self.plan
        words = (str(SCRIPT), json.dumps(asdict(plan)))
        # A single process is started as if by hand.
        run = (*RUN, *(("--nproc-per-node", str(plan.num_ranks)) if plan.num_ranks > 1 else ()))
        run = (*run, "--", sys.executable, *words)
        if kind.mounts:
            run = (*_MOUNT, os.path.join(self.directory, kind.mounts), *run[1:])
        variables = {"PL_FAULT_TOLERANT_OPTIONS": self.options, "TMPDIR": places.on_disk()}
        return RunningTrial(self.directory, run, variables, f"output-{len(self.outputs)}")

    def finish(self, undisturbed: object) -> str:
        """Wait until the run has ended by itself. Return what is wrong with it; an empty text if nothing is.

        Args:
            undisturbed: The weights of the undisturbed run.
        """
        try:
            codes = [self._wait()]
            if codes[0] in KINDS[self.trial.kind].ends:
                self.running = self._start()
                codes.append(self._wait())
            wrong = self._wrong(codes, undisturbed)
        except (AssertionError, TimeoutError) as error:
            wrong = f"{type(error).__name__}: {error}"
        finally:
            self.close()
        return wrong and f"{wrong}\n{self.plan}\n{self.options}\n{''.join(self.outputs)}"

    def _wrong(self, codes: list[int], undisturbed: object) -> str:
        weights = told(self.directory, "weights")
        if codes[-1] != 0:
            return f"The command ended with {codes}."
        if not (self.directory / "struck").exists():
            return "The fault did not come."
        if not weights:
            return "The script has not finished."
        if any(found != undisturbed for found in weights):
            return "The weights differ from those of the undisturbed run."
        return ""

    def _wait(self) -> int:
        ended = self.running.wait(_ENDS_WITHIN_SECONDS)
        self.outputs.append(f"\n=== output {len(self.outputs)}, exit code {ended.exit_code}\n{ended.output}")
        return ended.exit_code

    def close(self) -> None:
        """End it, and remove its files."""
        self.running.kill()
        shutil.rmtree(self.directory, ignore_errors=True)
