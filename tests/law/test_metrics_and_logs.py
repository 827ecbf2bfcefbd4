"""The law for metrics and logged values: every kind of metric, every way to log it, wherever the run is cut."""

from __future__ import annotations

import signal
from pathlib import Path

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torchmetrics import Metric

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt
from tests.processes import run
from tests.runs import Net, fit_net

EVERY_STEP = {"every_n_train_steps": 1}
ALWAYS = {"overhead_budget": 1.0}
NUM_BATCHES = 6


class Late(Metric):
    """Creates its states at its first batch."""

    def update(self, values: Tensor) -> None:
        if not hasattr(self, "total"):
            self.add_state("total", torch.zeros(values.shape[1:]), dist_reduce_fx="sum")
        self.total = self.total + values.sum(0)

    def compute(self) -> Tensor:
        return self.total.sum()


class LateNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.late = Late()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.late.update(batch)
        return super().training_step(batch, batch_idx)


def test_metric_that_makes_its_states_late_is_refused(tmp_path: Path) -> None:
    """State that a fresh metric can't hold is named, and the resume is refused as not exact."""

    def main(*faults: Callback) -> None:
        fit_net([FaultTolerance(**EVERY_STEP), *faults], tmp_path, module=LateNet())

    assert run(lambda: main(KillAt(3))).exit_code == -signal.SIGKILL
    ended = run(main)
    assert ended.exit_code == 1
    assert "metrics: nothing to restore 'late.total' into" in ended.output
