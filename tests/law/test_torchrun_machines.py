"""Machines leave and join a training that torchrun started on several: it continues, and consumes each sample once."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant import FaultTolerance
from tests.agents import Agent
from tests.rank_runs import for_ranks
from tests.runs import make_trainer

pytestmark = [*for_ranks, pytest.mark.slow]
NUM_SAMPLES = 64
GLOBAL_BATCH = 8
STEPS = 2 * NUM_SAMPLES // GLOBAL_BATCH
"""The steps of two epochs."""
SECONDS = 100.0


class Rows(Dataset[Tensor]):
    """A sample is its index."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Slow(LightningModule):
    """Notes the samples of each batch, and takes its time, so that machines can come and go."""

    def __init__(self, ledger: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self._ledger = str(ledger)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        samples = [int(sample) for sample in batch[:, 0]]
        line = [self.trainer.world_size, self.current_epoch, self.global_step, samples]
        with open(self._ledger, "a") as file:
            file.write(json.dumps(line) + "\n")
        is_alone = self.trainer.world_size == 1
        time.sleep(1.5 if is_alone and os.path.exists(f"{self._ledger}.waits") else 0.1)
        return self.layer(batch / NUM_SAMPLES).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Machines:
    """The machines of a run, each with an agent and one rank, and the samples that their ranks have consumed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._agents: list[Agent] = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self._port = free.getsockname()[1]

    @property
    def ledger(self) -> list[list[Any]]:
        """The batches: the number of ranks, the epoch, the step, the samples."""
        path = self._directory / "ledger.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def join(self, address: str) -> Agent:
        """Let a machine join."""
        agent = Agent(self._train, num_ranks=1, port=self._port, max_nodes=2, address=address, is_host=not self._agents)
        self._agents.append(agent)
        return agent

    def wait_for(self, num_ranks: int, *, step: int) -> None:
        """Wait until this number of ranks has come to a step."""
        deadline = time.monotonic() + SECONDS
        while not any(ranks == num_ranks and at >= step for ranks, _, at, _ in self.ledger):
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)

    @property
    def output(self) -> str:
        """What all have printed."""
        return "\n=====\n".join(agent.output for agent in self._agents)

    def kill(self) -> None:
        """End all of them."""
        for agent in self._agents:
            agent.kill()

    def _train(self) -> None:
        num_ranks = int(os.environ["WORLD_SIZE"])
        trainer = make_trainer(
            [FaultTolerance(self._directory / "autosaves", run_id="run", elastic=True, every_n_train_steps=1)],
            self._directory,
            max_epochs=1000,
            strategy="ddp",
            devices=1,
            num_nodes=num_ranks,
            enable_model_summary=False,
        )
        trainer.fit(Slow(self._directory / "ledger.jsonl"), DataLoader(Rows(), batch_size=GLOBAL_BATCH // num_ranks))


@contextmanager
def machines(directory: Path) -> Iterator[Machines]:
    """Yield the machines of a run, and kill them."""
    found = Machines(directory)
    try:
        yield found
    finally:
        found.kill()


def assert_each_sample_once(ledger: list[list[Any]], *, after: int) -> None:
    """Check the first two epochs, in which the number of ranks has become `after`."""
    resumed_at = min(step for ranks, _, step, _ in ledger if ranks == after)
    assert 0 < resumed_at < STEPS, "it began from the beginning, or came too late"
    counts = [Counter[int](), Counter[int]()]
    for ranks, epoch, step, samples in ledger:
        if epoch < len(counts) and (ranks == after or step < resumed_at):
            counts[epoch].update(samples)
    assert counts == [Counter(range(NUM_SAMPLES))] * len(counts)


def test_machine_leaves(tmp_path: Path) -> None:
    """Of two machines, the one with rank 0 is killed. The other one continues, and no sample is lost or repeated."""
    with machines(tmp_path) as run:
        run.join("127.0.0.2")
        leaves = run.join("127.0.0.1")
        run.wait_for(2, step=3)
        leaves.kill()
        run.wait_for(1, step=STEPS)
    assert_each_sample_once(run.ledger, after=1)


def test_machine_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine joins, as the first in order. All start again, saved, and no sample is lost or repeated.

    torch's agents can't let it join while they share the store: docs/troubleshooting.md, "Several ranks".
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with machines(tmp_path) as run:
        run.join("127.0.0.2")
        run.wait_for(1, step=2)
        (tmp_path / "ledger.jsonl.waits").touch()  # or a loaded machine trains two epochs before the other is there
        run.join("127.0.0.1")
        run.wait_for(2, step=STEPS)
    assert_each_sample_once(run.ledger, after=2)
