"""A model and data that need every rank's own state, and runs of several ranks that are checked against the law."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, distributed
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric

from lightning_faulttolerant.state.packing import unpack_blobs
from lightning_faulttolerant.testing import Interruption, KillAt, assert_resumes_exactly
from lightning_faulttolerant.trainer.ranks.gather import state_of
from tests.data_sets import NoisyDataset
from tests.runs import Cut, Net, fit_net

# Advice from Lightning: these laws are about values that differ from rank to rank.
for_ranks = [
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders:UserWarning"),
]
SECONDS = 60.0
"""How long one run of several ranks may take."""


class RankNet(Net):
    """Logs in all ways and keeps metrics. The higher its rank, the more random numbers it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.largest = MaxMetric()
        self.validated = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for _ in range(self.global_rank):
            random.gauss(0, 1), np.random.randn(), torch.randn(3)
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.largest.update(loss)
        self.log("synced", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("sum", loss, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("of_first", loss, on_step=True, on_epoch=True, rank_zero_only=True)
        return loss + 0.01 * torch.randn(()) * loss

    def on_train_epoch_end(self) -> None:
        self.log("largest", self.largest.compute())
        self.largest.reset()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        loss = self.layers(batch + 0.1 * torch.randn(())).square().mean()
        self.validated.update(loss)
        self.log("validated", self.validated)
        self.log("synced_val_loss", loss, sync_dist=True)


def shuffled(num_workers: int = 0, *, num_batches: int = 8, num_ranks: int = 2) -> DataLoader[Any]:
    """Return a loader of `num_batches` batches a rank, to which Lightning adds its distributed sampler."""
    return DataLoader(NoisyDataset(4 * num_batches * num_ranks), batch_size=4, shuffle=True, num_workers=num_workers)


def rank_fit(
    num_ranks: int,
    *,
    module: Callable[[], LightningModule] = RankNet,
    train: Callable[[], Any] | None = None,
    validation: Callable[[], Any] | None = None,
    users: Callable[[], list[Callback]] = list,
    url: str | None = None,
    **arguments: Any,
) -> Callable[[list[Callback], Path], Trainer]:
    """Return a fit on several ranks of what the callables return, saved in a bucket if one is passed.

    `arguments` are the Trainer's.
    """

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(
            [*users(), *callbacks],
            directory if url is None else f"{url}/{directory.name}",  # type: ignore[arg-type]
            train=shuffled(num_ranks=num_ranks) if train is None else train(),
            validation=DataLoader(NoisyDataset(4 * 2 * num_ranks), batch_size=4)
            if validation is None
            else validation(),
            module=module(),
            **{"devices": num_ranks, "strategy": "ddp", **arguments},
        )

    return fit


def assert_ranks_resume(
    fit: Callable[[list[Callback], Path], Trainer],
    faults: Sequence[Any],
    *,
    num_ranks: int = 2,
    every: int = 1,
    **arguments: Any,
) -> list[Interruption]:
    """Check that a run of several ranks, saved every `every` steps, obeys the law."""
    options = {"every_n_train_steps": every}
    return assert_resumes_exactly(
        fit, faults, options=options, num_ranks=num_ranks, timeout_seconds=SECONDS, **arguments
    )


def assert_ranks_continue(cut: Cut, *, rank: int | None = None, num_ranks: int = 2, **arguments: Any) -> None:
    """Check that a run of several ranks obeys the law if `rank` is killed at `cut`; `arguments` go to `rank_fit`."""
    fit = rank_fit(num_ranks, **arguments)
    [cost] = assert_ranks_resume(fit, [KillAt(cut.kill, rank=rank)], num_ranks=num_ranks, every=cut.every)
    assert (cost.exit_code, cost.epoch, cost.batch) == (-signal.SIGKILL, *cut.continues_at), cost


def rank_here() -> int:
    """Return the rank of this process."""
    return distributed.get_rank()


class Slowly(Callback):
    """Is slow, so that the ranks agree on a stop within the next batches."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.03)

    def on_validation_batch_start(self, *_: Any) -> None:
        time.sleep(0.03)


def of_first_rank(part: str | None) -> Any:
    """Return a `state_of` that returns a part of rank 0's state, or all of it, for each rank."""

    def state(saved: Mapping[str, Any], rank: int, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        first = unpack_blobs(saved["ranks"][0])
        return first if part is None else {**state_of(saved, rank, checkpoint), part: first[part]}

    return state
