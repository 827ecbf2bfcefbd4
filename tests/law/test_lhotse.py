"""The law for lhotse's samplers, which yield cuts instead of integers, in scripts as lhotse documents them."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.runs import Cut as Place, make_trainer

pytestmark = [
    pytest.mark.slow,  # lhotse is only in the environment for libraries, and the tests import it
    pytest.mark.filterwarnings("ignore:You are using Dynamic.*Sampler with an eagerly read CutSet:UserWarning"),
    pytest.mark.filterwarnings("ignore:Your 'buffer_size' setting of:UserWarning"),
]


def cuts() -> Any:
    """Return 40 cuts of one to two seconds, without audio."""
    from lhotse import CutSet
    from lhotse.testing.dummies import dummy_cut, dummy_supervision

    return CutSet.from_cuts(
        dummy_cut(i, duration=1 + (i * 7 % 10) / 10, recording_duration=3, supervisions=[dummy_supervision(i)])
        for i in range(40)
    )


def sampler(name: str) -> Any:
    """Return a sampler as in lhotse's documentation."""
    from lhotse.dataset import DynamicBucketingSampler, DynamicCutSampler, SimpleCutSampler

    if name == "simple":
        return SimpleCutSampler(cuts(), max_duration=6.0, shuffle=True, drop_last=True)
    if name == "dynamic":
        return DynamicCutSampler(cuts(), max_duration=6.0, shuffle=True)
    return DynamicBucketingSampler(cuts(), max_duration=6.0, num_buckets=4, shuffle=True)


class Speech(Dataset[Tensor]):
    """Fetches a whole batch by its cuts, and draws for each."""

    def __getitem__(self, cuts: Any) -> Tensor:
        rows = torch.tensor([[float(cut.id.split("-")[-1]), cut.duration, cut.start, 1.0] for cut in cuts]) / 40
        return rows + 0.1 * (random.gauss(0, 1) + float(np.random.randn()) + torch.randn(()))


class Acoustic(LightningModule):
    """Dropout and Adam; a batch may have a single cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    "place", [Place(kill=3, every=1, continues_at=(0, 3)), Place(kill=18, every=1, continues_at=(1, 5))]
)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ["simple", "dynamic", "bucketing"])
def test_continues(name: str, num_workers: int, place: Place) -> None:
    """Killed in any epoch, with batches in flight or without, the run equals the uninterrupted one."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        loader = DataLoader(Speech(), sampler=sampler(name), batch_size=None, num_workers=num_workers)
        trainer = make_trainer(callbacks, directory)
        trainer.fit(Acoustic(), loader)
        return trainer

    [cost] = assert_resumes_exactly(fit, [KillAt(place.kill)], options={"every_n_train_steps": place.every})
    assert (cost.exit_code, cost.epoch, cost.batch) == (-signal.SIGKILL, *place.continues_at)
