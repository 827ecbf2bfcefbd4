"""This package's samplers and streaming data sets continue on another number of ranks, step by step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import InterruptibleDistributedSampler, StreamingDataLoader, StreamingDataset
from tests.laws.cuts import Cut
from tests.laws.data_sets import Quiet
from tests.laws.events import read, write
from tests.laws.features.streams import shards
from tests.laws.rows import Group, Row
from tests.laws.runs import Training

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use .self.log")


class Numbers(StreamingDataset):
    """A sample is its number, four times."""

    def __getitem__(self, at: Any) -> Tensor:
        return torch.full((4,), float(super().__getitem__(at)["n"]))


def batch_size() -> int:
    """Return the part of a global batch of 4 for this rank."""
    return 4 // int(os.environ.get("WORLD_SIZE", 1))


def sampled(order: Any) -> DataLoader[Any]:
    """Return a loader with a distributed sampler."""
    return DataLoader(Quiet(24), batch_size(), sampler=InterruptibleDistributedSampler(24, order=order))


def streamed(num_workers: Callable[[], int]) -> DataLoader[Any]:
    """Return a loader of a streaming data set."""
    return StreamingDataLoader(Numbers(shards(), shuffle=True), batch_size=batch_size(), num_workers=num_workers())


MAKES: dict[str, Callable[[], Any]] = {
    "torch": lambda: sampled("torch"),
    "feistel": lambda: sampled("feistel"),
    "streaming": lambda: streamed(lambda: 0),
    "streaming, in two workers of one rank": lambda: streamed(lambda: 0 if "WORLD_SIZE" in os.environ else 2),
}


class WritesSamples(Callback):
    """Writes the samples of each step."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        path = Path(f"samples-{trainer.global_rank}.jsonl").absolute()
        write(path, "samples", step=trainer.global_step, samples=batch[:, 0].tolist())


def steps(root: Path) -> dict[int, list[float]]:
    """Return the samples of each global step, over all ranks and starts."""
    found: dict[int, list[float]] = {}
    for path in root.glob("samples-*.jsonl"):
        for event in read(path):
            found.setdefault(event["step"], []).extend(event["samples"])
    return {step: sorted(samples) for step, samples in sorted(found.items())}


@pytest.mark.parametrize("name", MAKES)
def test_other_ranks_continue(name: str, tmp_path: Path) -> None:
    """Two ranks, then one: each global step has the samples of a run on one rank, and each epoch every sample once."""
    options = {"elastic": True} if "streaming" in name else {"elastic": True, "worker_rng": "per_sample"}
    group = Group(rows=(Row(name=name, train=MAKES[name], callbacks=WritesSamples, options=options),))
    Training(group=group, root=tmp_path / "whole").finished()
    training = Training(group=group, root=tmp_path / "cut", num_ranks=2)
    stopped = training.start(Cut(at=(0, 3), by=signal.SIGTERM))
    assert stopped.codes == [128 + signal.SIGTERM] * 2, stopped.output
    training.num_ranks = 1
    training.finished()
    whole = steps(tmp_path / "whole")
    assert steps(tmp_path / "cut") == whole
    epochs = [sorted(each for step in range(begin, begin + 6) for each in whole[step]) for begin in (1, 7)]
    assert epochs[0] == epochs[1]
    assert len(set(epochs[0])) == 24
