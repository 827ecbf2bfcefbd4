"""A script that a supervised run starts, in which one fault comes, once, at a moment that its arguments name."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, get_worker_info

from tests.cli.supervise.fault_kinds import Place, cause
from tests.cli.supervise.own_mounts import join_mounts_of
from tests.data_sets import NoisyDataset
from tests.faulty_files import FaultyFiles
from tests.scripts import tell

NUM_EPOCHS, NUM_BATCHES, NUM_EVALUATED = 2, 5, 2
WRITE = "write"
"""Not a hook: a step in the directory of the autosaves, such as a write or a rename."""
HOOKS = {
    "setup": {"setup": 1, "on_fit_start": 1, "on_train_start": 1},
    "training": dict.fromkeys(
        ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end"),
        NUM_EPOCHS * NUM_BATCHES,
    ),
    "saving": {"on_save_checkpoint": 8, WRITE: 80},
    "validation": dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end"), NUM_EPOCHS * NUM_EVALUATED)
    | {"on_validation_epoch_end": NUM_EPOCHS},
    "teardown": {"on_train_end": 1, "on_fit_end": 1, "teardown": 1},
}
"""The hooks of each moment, with how often they are called at least, in a run with an autosave every step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The arguments of the script.

    Args:
        directory: Its directory.
        num_ranks: The number of ranks.
        num_workers: The number of loader workers.
        kind: The kind of the fault; empty for none.
        hook: Where it comes: one of `HOOKS`.
        number: At which call of that hook, from 0.
        rank: On which rank.
        seed: For what the kind leaves open.
        has_mounts: Whether the command has its own file systems.
    """

    directory: str
    num_ranks: int
    num_workers: int
    kind: str = ""
    hook: str = ""
    number: int = 0
    rank: int = 0
    seed: int = 0
    has_mounts: bool = False

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.directory)


class Strike(Callback):
    """Causes the fault, once in all starts of the script."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.files: FaultyFiles | None = None
        self.counter = Counter()

    def come(self, hook: str, rank: int) -> None:
        """Note that a hook is called."""
        plan = self.plan
        if (hook, rank) != (plan.hook, plan.rank) or (plan.path / "struck").exists():
            return
        if self.counter.up() > plan.number:
            (plan.path / "struck").touch()
            if cause(plan.kind, Place(directory=plan.path, seed=plan.seed)) is False:
                (plan.path / "struck").unlink()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.plan.hook == WRITE and trainer.global_rank == self.plan.rank:
            self.files = FaultyFiles(self.plan.path / "autosaves", self.write)
            self.files.__enter__()
        self.come("setup", trainer.global_rank)

    def write(self, step: object, carry_out: Callable[..., Any]) -> Any:
        self.come(WRITE, self.plan.rank)
        return carry_out()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.come("teardown", trainer.global_rank)
        if self.files is not None:
            self.files.__exit__()


class Counter:
    """Counts calls; it is no state of the run."""

    def __init__(self) -> None:
        self._number = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Counter], tuple[()]]:
        return Counter, ()

    def up(self) -> int:
        """Return the number of calls so far."""
        with self._lock:
            self._number += 1
            return self._number


def _hook(name: str) -> Any:
    def come(self: Strike, trainer: Trainer, *_: object) -> None:
        self.come(name, trainer.global_rank)

    return come


for _name in {name for names in HOOKS.values() for name in names} - {"setup", "teardown", WRITE}:
    setattr(Strike, _name, _hook(_name))


class Net(LightningModule):
    """A small model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class StuckDataset(NoisyDataset):
    """Blocks a worker once a file asks for it, as a lock does that was held when the worker was forked."""

    def __init__(self, length: int, directory: Path) -> None:
        super().__init__(length)
        self.directory = directory

    def __getitem__(self, index: int) -> Tensor:
        if get_worker_info() is not None and (self.directory / "deadlock").exists():
            (self.directory / "deadlock").unlink(missing_ok=True)
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return super().__getitem__(index)


def main() -> None:
    """Train, and write down the final weights."""
    plan = Plan(**json.loads(sys.argv[1]))
    if plan.has_mounts:
        join_mounts_of(os.getppid())
    warnings.simplefilter("ignore")
    random.seed(1), np.random.seed(1), torch.manual_seed(1), torch.set_num_threads(1)
    (plan.path / "autosaves").mkdir(exist_ok=True)

    def loader(num_batches: int, **more: Any) -> DataLoader[Tensor]:
        data = StuckDataset(4 * num_batches, plan.path)
        return DataLoader(data, batch_size=4 // plan.num_ranks, num_workers=plan.num_workers, **more)

    trainer = Trainer(
        max_epochs=NUM_EPOCHS,
        accelerator="cpu",
        devices=plan.num_ranks,
        strategy="ddp" if plan.num_ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=plan.directory,
        callbacks=[Strike(plan)],
    )
    net = Net()
    tell(plan.path, "starts", os.getpid())
    trainer.fit(net, loader(NUM_BATCHES, shuffle=True), loader(NUM_EVALUATED))
    if trainer.global_rank == 0:
        tell(plan.path, "weights", [p.tolist() for p in net.parameters()])


if __name__ == "__main__":
    main()
