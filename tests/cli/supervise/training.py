"""A script that a supervised run starts: it knows nothing of supervision, and fails in the way that it is told to."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, get_worker_info

from tests.data_sets import NoisyDataset

NUM_EPOCHS, NUM_BATCHES = 2, 8
_LONG_SECONDS = 600


def _raise() -> None:
    raise ValueError("this batch can't be trained")


def _hold_the_interpreter() -> None:
    while True:  # a signal interrupts the sleep
        ctypes.PyDLL(None).sleep(_LONG_SECONDS)  # PyDLL keeps the GIL


FLAWS = {
    "exception": _raise,
    "os._exit": lambda: os._exit(9),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(_LONG_SECONDS),
    "GIL": _hold_the_interpreter,
}


class Net(LightningModule):
    """A small model with dropout, whose step may have a flaw.

    Args:
        arguments: The arguments of the script.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.arguments = arguments

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        _record(self.arguments.directory, "steps", [os.getpid(), self.global_step])
        if self.global_rank == self.arguments.rank:
            strike(self.arguments, self.global_step)
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class StuckDataset(NoisyDataset):
    """A sample blocks its worker, as a lock does that was held when the worker was forked.

    Args:
        arguments: The arguments of the script.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(4 * NUM_BATCHES)
        self.arguments = arguments

    def __getitem__(self, index: int) -> Tensor:
        worker = get_worker_info()
        if worker is not None and worker.id == 1 and index % 3 == 0 and first_time(self.arguments.directory):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return super().__getitem__(index)


def strike(arguments: argparse.Namespace, step: int) -> None:
    """Fail at this step, if that is asked for: always, once, or each time one step later."""
    if arguments.flaw == "short sleep":
        time.sleep(0.1)
    if arguments.flaw not in FLAWS or step < arguments.at:
        return
    if arguments.how == "always" and step > arguments.at:
        return
    if arguments.how == "once" and not first_time(arguments.directory):
        return
    if arguments.how == "wandering" and not first_time(arguments.directory, f"struck-{step}"):
        return
    FLAWS[arguments.flaw]()


def first_time(directory: Path, name: str = "struck") -> bool:
    """Return whether this is called for the first time."""
    try:
        (directory / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _record(directory: Path, name: str, value: Any) -> None:
    with open(directory / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(value) + "\n")


def main() -> None:
    """Train, and write down the final weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--flaw", default="")
    parser.add_argument("--how", default="once")
    parser.add_argument("--at", type=int, default=5)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.flaw == "import error":
        raise ImportError("no such module")
    random.seed(1), np.random.seed(1), torch.manual_seed(1), torch.set_num_threads(1)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    stuck = arguments.flaw == "worker"
    dataset = StuckDataset(arguments) if stuck else NoisyDataset(4 * NUM_BATCHES)
    loader = DataLoader(dataset, batch_size=4 // num_ranks, shuffle=True, num_workers=arguments.workers)
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
        default_root_dir=arguments.directory,
    )
    net = Net(arguments)
    trainer.fit(net, loader, DataLoader(NoisyDataset(8), batch_size=4))
    if trainer.global_rank == 0:
        _record(arguments.directory, "weights", [p.tolist() for p in net.parameters()])
        _record(arguments.directory, "environment", {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")})


if __name__ == "__main__":
    main()
