"""Weights of another type than 32 bits are restored to the last bit, or the run reports that they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_faulttolerant import FaultTolerance, NotExactError
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.processes import run
from tests.runs import Net, fit_net

OPTIONS = {"every_n_train_steps": 1}


class DoubleNet(Net):
    """Becomes double when its fit starts, after a checkpoint is loaded."""

    def on_fit_start(self) -> None:
        self.double()

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch.double()


class ScriptedNet(Net):
    """Has a scripted batch norm, whose flags are constants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), torch.jit.script(nn.BatchNorm1d(8)), nn.Linear(8, 1))


@pytest.mark.parametrize("kill", [3, 8])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true", "bf16-mixed"])
def test_each_precision_continues(precision: Any, kill: int) -> None:
    """Double weights are not loaded through 32 bits, and half and mixed ones lose nothing."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, precision=precision)

    [cost] = assert_resumes_exactly(fit, [KillAt(kill)], options=OPTIONS)
    assert (cost.epoch, cost.batch) == divmod(kill, 5)


def test_a_module_that_becomes_double_after_the_load_is_refused(tmp_path: Path) -> None:
    """A module that becomes double after the load is refused with both types, or, if not strict, gets a note."""

    def fit(*callbacks: Callback, **options: Any) -> FaultTolerance:
        ours = FaultTolerance(tmp_path / "saves", run_id="double", every_n_train_steps=1, **options)
        fit_net([ours, *callbacks], tmp_path, module=DoubleNet())
        return ours

    assert run(lambda: fit(KillAt(3))).exit_code == -9
    refused = run(lambda: fit())
    assert refused.exit_code == 1
    assert f"{NotExactError.__name__}: " in refused.output
    assert "layers.0.weight is saved as float64 and would be loaded as float32 (and 5 more)" in refused.output
    told = run(lambda: print(fit(strict=False).resume_report))
    assert told.exit_code == 0, told.output
    assert "Resumed NOT EXACTLY before batch 3" in told.output
    assert "would be loaded as float32" in told.output


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_norm_continues() -> None:
    """A flag that already has the right value is not set, since that fails in a scripted module."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=ScriptedNet())

    [cost] = assert_resumes_exactly(fit, [KillAt(3)], options=OPTIONS)
    assert (cost.epoch, cost.batch) == (0, 3)
