"""Negative controls: without any one part of the state the law is broken, and the first breach is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_faulttolerant.testing import KillAt, NotTheSame, assert_resumes_exactly
from lightning_faulttolerant.trainer.save.run_state import TITLES
from tests.callbacks import StopsAt
from tests.data_sets import NoisyDataset
from tests.modules import BufferNet, FreezingNet, HoldingNet, MetricNet
from tests.runs import Net, fit_net


class LogsItsMetric(Callback):
    """Keeps a metric in an attribute, and logs it at the end of the epoch."""

    def __init__(self) -> None:
        self.mean = MeanMetric()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self.mean.update(outputs["loss"])

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log("seen_by_callback", self.mean.compute())
        self.mean.reset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """A run that needs a part of the state; `event` is the kind of event that first differs without it."""

    event: str
    module: Callable[[], LightningModule] = Net
    users: Callable[[], list[Callback]] = list
    train: Callable[[], DataLoader] = lambda: DataLoader(NoisyDataset(20), batch_size=4)
    arguments: Mapping[str, Any] = field(default_factory=dict)


class CollectsOutputs(Net):
    """Logs the mean of its steps' outputs in an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.outputs.append(super().training_step(batch, batch_idx))
        return self.outputs[-1]

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


NEEDS = {
    "rng": Needs(event="batch"),
    "held": Needs(event="step", module=HoldingNet),
    "loaders": Needs(event="batch", train=lambda: DataLoader(NoisyDataset(20), batch_size=4, shuffle=True)),
    "gradients": Needs(event="step", arguments={"accumulate_grad_batches": 2}),
    "buffers": Needs(event="step", module=BufferNet),
    "metrics": Needs(event="log", module=MetricNet),
    "results": Needs(event="log"),
    "flags": Needs(event="step", module=FreezingNet),
    "callbacks": Needs(event="log", users=lambda: [LogsItsMetric()]),
    "objects": Needs(event="log", module=CollectsOutputs),
    "trainer": Needs(event="batch", users=lambda: [StopsAt()], arguments={"min_epochs": 1, "max_epochs": 3}),
}


def assert_continues_without(part: str | None, needs: Needs) -> None:
    """Check a run against the law, killed in the first epoch at batch 3 and resumed without `part`."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(
            [*needs.users(), *callbacks],
            directory,
            train=needs.train(),
            module=needs.module(),
            **needs.arguments,
        )

    assert_resumes_exactly(fit, [KillAt(3)], options={"overhead_budget": 1.0}, without=part)


def test_every_part_has_a_control() -> None:
    """There is exactly one run for each part of the state."""
    assert NEEDS.keys() == TITLES.keys()


@pytest.mark.parametrize("part", TITLES)
def test_run_continues_with_all_parts(part: str) -> None:
    """The run that needs the part continues exactly with it."""
    assert_continues_without(None, NEEDS[part])


@pytest.mark.parametrize("part", TITLES)
def test_run_without_a_part_is_not_the_same(part: str) -> None:
    """Without the part the run differs, and the error names the first event that differs, with both contents."""
    needs = NEEDS[part]
    found = rf'Event \d+ (of the interrupted run differs|is (missing|too many) in)[^"]*(.|\n)*"event": "{needs.event}"'
    with pytest.raises(NotTheSame, match=found) as raised:
        assert_continues_without(part, needs)
    assert ("Left out: module.outputs" in str(raised.value)) == (part == "objects")
