"""A training script that is started in each of the ways in which ranks start: by Lightning, by torchrun, by a test.

Each rank writes its own trace, one file for each of its processes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing.exactness import Event, Trace, before, compare, read_trace
from lightning_faulttolerant.trainer.recorder import Recorder, record_end
from tests.data_sets import NoisyDataset
from tests.rank_runs import RankNet, shuffled
from tests.runs import fit_net

NUM_RANKS = 2


class RankRecorder(Recorder):
    """Records into a file for this rank and this process, including the end of the fit."""

    def __init__(self, directory: Path, fit: int, seed: int) -> None:
        super().__init__(directory)
        self.directory = directory
        self.fit = fit
        self.seed = seed

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        found = len(list(self.directory.glob(f"fit-{self.fit}-rank-{trainer.global_rank}-*.jsonl")))
        self._path = self.directory / f"fit-{self.fit}-rank-{trainer.global_rank}-{found}.jsonl"
        self._path.touch()
        _seed(self.seed)  # a forked process has another state of Python's generator
        super().setup(trainer, pl_module, stage)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record_end(self, trainer, {"torch": str(torch.rand(2).tolist())})


class KillOnce(Callback):
    """Kills a rank at a step of the optimizer, unless an earlier process was killed there."""

    def __init__(self, directory: Path, step: int, rank: int) -> None:
        self.mark = directory / "killed"
        self.step = step
        self.rank = rank

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (self.step, self.rank) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    directory: Path,
    *,
    strategy: str = "ddp",
    protected: bool = True,
    kill_fit: int = -1,
    num_fits: int = 1,
    num_workers: int = 0,
    seed: int = 1,
) -> list[FaultTolerance]:
    """Run the script; return the callbacks of its fits."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    protections = []
    for fit in range(num_fits):
        _seed(seed + 1000 * fit)
        callbacks: list[Callback] = [RankRecorder(directory, fit, seed)]
        if protected:
            protections.append(FaultTolerance(directory / "autosaves", run_id="run", every_n_train_steps=1))
            callbacks.insert(0, protections[-1])
        if fit == kill_fit:
            callbacks.append(KillOnce(directory, step=5, rank=1))
        fit_net(
            callbacks,
            directory,
            module=RankNet(),
            train=shuffled(num_workers, num_batches=4),
            validation=DataLoader(NoisyDataset(16), batch_size=4),
            devices=NUM_RANKS,
            strategy=strategy,
        )
    return protections


def _seed(seed: int) -> None:
    # Not with Lightning's function: it would also seed the distributed sampler, and a restart refuses another seed.
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def traces(directory: Path, fit: int) -> list[list[Trace]]:
    """Return the traces of each rank's processes, in order."""
    ranks = range(NUM_RANKS)
    paths = [sorted(directory.glob(f"fit-{fit}-rank-{rank}-*.jsonl"), key=_number) for rank in ranks]
    return [[read_trace(path) for path in of_rank] for of_rank in paths]


def _number(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def joined(processes: list[Trace]) -> list[Event]:
    """Return what the processes of a rank did together, each from the point where it resumed."""
    events: list[Event] = []
    for number, trace in enumerate(processes):
        if number:
            assert trace.resumed is not None, "it began from the beginning"
            assert trace.resumed["exact"]
            events = before(events, trace.resumed)
        events += trace.events
    return events


def assert_same(whole: Path, interrupted: Path, *, fit: int = 0, num_processes: int = 2) -> None:
    """Check that an interrupted fit of a script equals the uninterrupted one."""
    expected, found = traces(whole, fit), traces(interrupted, fit)
    assert [len(rank) for rank in found] == [num_processes] * NUM_RANKS
    compare([joined(rank) for rank in expected], [joined(rank) for rank in found], f"fit {fit} of the script")


def main() -> None:
    """Run the script with arguments from JSON."""
    arguments = json.loads(sys.argv[1])
    train(Path(arguments.pop("directory")), **arguments)


if __name__ == "__main__":
    main()
