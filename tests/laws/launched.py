"""A training script that each launcher may start, and torchrun's agents; each rank of each start writes its events."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_faulttolerant import FaultTolerance
from tests.laws.events import Events, opened
from tests.laws.processes import fork, signal_to
from tests.laws.ranks import Slowly, batches
from tests.laws.rows import Net
from tests.laws.runs import QUIET

# A machine is given up after five seconds without a sign of life. A further one is awaited for four.
_HASTE = {"last_call_timeout": 4, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}


class Draws(Net):
    """Draws more random numbers on rank 1. Without metrics: a spawned process computes other last bits of them."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        torch.randn(1 + self.global_rank)
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.randn(()))


class OfRank(Events):
    """Writes the events of a rank, and gives it random states of its own, others at each start."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        rank = trainer.global_rank
        number = len(list(self.directory.glob(f"start-*-rank-{rank}.jsonl")))
        self.path = self.directory / f"start-{number}-rank-{rank}.jsonl"
        opened(self.path)
        seed(1_000 * number + rank)


class KillOnce(Callback):
    """Kills rank 1 in the second epoch, or stops it, unless that was done before."""

    def __init__(self, mark: Path, signum: int = signal.SIGKILL) -> None:
        self.mark, self.signum = mark, signum

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (8, 1) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), self.signum)


def seed(number: int) -> None:
    """Seed the global generators; Lightning's function would also seed the distributed sampler."""
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


def train(directory: Path, *more: Callback, strategy: str = "ddp", protected: bool = True) -> None:
    """Train on two ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed(1)
    own = [FaultTolerance(directory / "autosaves", run_id="run", every_n_train_steps=1)] if protected else []
    trainer = Trainer(
        callbacks=[*own, OfRank(directory), *more],
        devices=2,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=directory,
        **QUIET,
    )
    data = batches()
    trainer.fit(Draws(), data.train(), data.validation())  # type: ignore[misc]


class Agent:
    """A torchrun whose ranks are forked: a start takes no import.

    Args:
        main: What each rank does.
        num_ranks: The number of its ranks.
        port: Where it meets the agents of other machines; 0 if it is alone.
        address: The address of its machine. The agent with the first one in order has rank 0.
        is_host: Whether the others meet at this one.
    """

    def __init__(
        self,
        main: Callable[[], object],
        *,
        num_ranks: int = 2,
        port: int = 0,
        address: str | None = None,
        is_host: bool = True,
    ) -> None:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=2 if port else 1,
            nproc_per_node=num_ranks,
            run_id="test",
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{port}",
            rdzv_configs={**_HASTE, "is_host": is_host},
            max_restarts=3,
            monitor_interval=0.05,
            local_addr=address,
            start_method="fork",
        )

        def as_rank() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has the agent's handlers
            signal.signal(signal.SIGINT, signal.default_int_handler)
            main()

        output = self._output = Path(tempfile.mkstemp(suffix=".txt")[1])
        self._process = fork(lambda: elastic_launch(config, as_rank)(), output=output, seed=1, environment={})

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait(self) -> int:
        process, self._process = self._process, 0
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def kill(self) -> None:
        """Kill it and its ranks, as when their machine goes down."""
        if self._process:
            signal_to(self._process, signal.SIGKILL, os.killpg)
            self.wait()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    root = Path(given["directory"])
    train(root, KillOnce(root / "killed", given["signum"]), Slowly(), strategy=given["strategy"])
