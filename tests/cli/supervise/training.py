"""A script that a supervised run starts. It knows nothing of supervision; a fault comes where its arguments say."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tests.cli.supervise.fault_kinds import KINDS
from tests.scripts import tell

NUM_EPOCHS, NUM_BATCHES, NUM_EVALUATED = 2, 5, 2
BATCH = "on_train_batch_start"
HOOKS = {
    "setup": {"setup": 1, "on_fit_start": 1, "on_train_start": 1},
    "training": dict.fromkeys(
        (BATCH, "on_before_backward", "on_after_backward", "on_train_batch_end"), NUM_EPOCHS * NUM_BATCHES
    ),
    "saving": {"on_save_checkpoint": 8},
    "validation": dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end"), NUM_EPOCHS * NUM_EVALUATED)
    | {"on_validation_epoch_end": NUM_EPOCHS},
    "teardown": {"on_train_end": 1, "on_fit_end": 1, "teardown": 1},
}
"""The hooks of each moment, with how often they are called at least, in a run with an autosave every step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The arguments of the script: a kind of fault, at which call of which hook, from 0, and on which rank.

    It comes once in all starts of the script, or always at one step, or (wandering) once at each step from there on.
    """

    num_workers: int = 0
    kind: str = ""
    hook: str = BATCH
    number: int = 3
    rank: int = 0
    how: str = "once"
    seed: int = 0
    seconds: float = 0
    """How long each batch takes."""


class Strike(Callback):
    """Causes the fault."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan, self.directory = plan, directory
        self.counter = Counter()

    def come(self, hook: str, trainer: Trainer, *_: object) -> None:
        """Note that a hook is called."""
        plan, struck = self.plan, self.directory / "struck"
        if hook == BATCH:
            tell(self.directory, "steps", [os.getpid(), trainer.global_step])
            time.sleep(plan.seconds)
        if not plan.kind or (hook, trainer.global_rank) != (plan.hook, plan.rank):
            return
        if plan.how == "once":
            has_come = not struck.exists() and self.counter.up() > plan.number
        elif plan.how == "always":
            has_come = trainer.global_step == plan.number
        else:
            struck = self.directory / f"struck-{trainer.global_step}"
            has_come = trainer.global_step >= plan.number and not struck.exists()
        if has_come:
            struck.touch()
            if KINDS[plan.kind].cause(self.directory, plan.seed) is False:
                struck.unlink()


class Counter:
    """Counts calls; it is no state of the run."""

    number = 0

    def __reduce__(self) -> tuple[type[Counter], tuple[()]]:
        return Counter, ()

    def up(self) -> int:
        """Return the number of calls so far."""
        self.number += 1
        return self.number


for _name in {name for names in HOOKS.values() for name in names}:
    setattr(Strike, _name, lambda self, trainer, *_, name=_name, **__: self.come(name, trainer))


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


class StuckDataset(Dataset[Tensor]):
    """Samples with noise. It blocks a worker once if a file asks for it, as a lock that was held at its fork does."""

    def __init__(self, length: int, directory: Path) -> None:
        self.length, self.directory = length, directory

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if get_worker_info() is not None and (self.directory / "deadlock").exists():
            with suppress(FileNotFoundError):
                (self.directory / "deadlock").unlink()
                lock = threading.Lock()
                lock.acquire()
                lock.acquire()
        return torch.rand(4) + index + random.random() + float(np.random.rand())


def main() -> None:
    """Train, and write down the final weights."""
    directory, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    if plan.kind == "import error":
        raise ImportError("no such module")
    warnings.simplefilter("ignore")
    random.seed(1), np.random.seed(1), torch.manual_seed(1), torch.set_num_threads(1)
    (directory / "autosaves").mkdir(exist_ok=True)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))

    def loader(num_batches: int, **more: Any) -> DataLoader[Tensor]:
        data = StuckDataset(4 * num_batches, directory)
        return DataLoader(data, batch_size=4 // num_ranks, num_workers=plan.num_workers, **more)

    trainer = Trainer(
        max_epochs=NUM_EPOCHS,
        accelerator="cpu",
        devices=num_ranks,
        strategy="ddp" if num_ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=directory,
        callbacks=[Strike(plan, directory)],
    )
    net = Net()
    trainer.fit(net, loader(NUM_BATCHES, shuffle=True), loader(NUM_EVALUATED))
    if trainer.global_rank == 0:
        tell(directory, "weights", [p.tolist() for p in net.parameters()])
        tell(directory, "environment", [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")])


if __name__ == "__main__":
    main()
