"""A script that a supervised run starts. It knows nothing of supervision; a fault comes where its arguments say."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

NUM_EPOCHS, NUM_BATCHES, NUM_EVALUATED = 2, 5, 2
BATCH = "on_train_batch_start"
HOOKS = (BATCH, "on_fit_start", "on_save_checkpoint", "on_validation_batch_start", "on_train_end")


def told(directory: Path, name: str) -> list[Any]:
    """Return the values that the script has recorded under a name."""
    path = directory / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tell(directory: Path, name: str, value: Any) -> None:
    """Record a value for the test."""
    with open(directory / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(value) + "\n")


def fail(*_: object) -> None:
    """Raise an exception."""
    raise ValueError("an exception")


def hold_the_interpreter(*_: object) -> None:
    """Sleep in C with the GIL."""
    while True:  # a signal interrupts the sleep
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the GIL


def read_from_nobody(directory: Path) -> None:
    """Block in C until another process writes."""
    os.mkfifo(directory / "fifo")
    os.open(directory / "fifo", os.O_RDONLY)


def let_clock_jump(directory: Path, days: int) -> None:
    """Change the time of the process, and that of its files; end it soon, so that another has to find them."""
    now, seconds = time.time, days * 86_400
    time.time = lambda: now() + seconds
    for path in (directory / "autosaves").rglob("*"):
        with suppress(FileNotFoundError):
            os.utime(path, (path.stat().st_mtime + seconds,) * 2)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()


KINDS: dict[str, Callable[[Path], object]] = {
    "exception": fail,
    "exit with 0": lambda _: os._exit(0),
    "SIGKILL": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "GIL": hold_the_interpreter,
    "killed worker": lambda _: multiprocessing.active_children()[0].kill(),
    "worker deadlock": lambda here: (here / "deadlock").touch(),  # see `StuckDataset`
    "rank without collective": lambda _: threading.Event().wait(),
    "file system that blocks": read_from_nobody,
    "clock that jumps ahead": lambda here: let_clock_jump(here, 400),
    "clock that jumps back": lambda here: let_clock_jump(here, -400),
}
"""The faults. Each is caused in a training process, with the directory of the script."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The arguments of the script: a kind of fault, in which hook, from which step on, and on which rank.

    It comes once in all starts of the script, or in each that gets to its step.
    """

    num_workers: int = 0
    kind: str = ""
    hook: str = BATCH
    number: int = 3
    rank: int = 0
    always: bool = False
    seconds: float = 0
    """How long each batch takes."""


class Strike(Callback):
    """Causes the fault."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan, self.directory = plan, directory

    def come(self, hook: str, trainer: Trainer, *_: object) -> None:
        """Note that a hook is called."""
        plan, struck = self.plan, self.directory / "struck"
        if hook == BATCH:
            tell(self.directory, "steps", [os.getpid(), trainer.global_step])
            time.sleep(plan.seconds)
        if not plan.kind or (hook, trainer.global_rank) != (plan.hook, plan.rank):
            return
        if trainer.global_step >= plan.number and (plan.always or not struck.exists()):
            struck.touch()
            KINDS[plan.kind](self.directory)


for _name in HOOKS:
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
