"""Optimizers with groups that the module changes in hooks that do not run again, such as unfreezing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt, NotTheSame
from tests.rank_runs import assert_ranks_continue, for_ranks
from tests.runs import Cut, Net, RaiseAt, assert_exact, fit_net

pytestmark = for_ranks

NUM_BATCHES = 5


class Unfreezes(Net):
    """Trains its head, from the second epoch its norm, and from the third its first layer, each in its own group."""

    def __init__(self, *, freezes: bool = True) -> None:
        super().__init__()
        self.layers[:2].requires_grad_(not freezes)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.layers[3].parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    def on_train_epoch_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.current_epoch == 1:
            self.layers[1].requires_grad_(True)
            optimizer.add_param_group({"params": list(self.layers[1].parameters()), "lr": 0.005})
        if self.current_epoch == 2:
            self.layers[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(self.layers[0].parameters()), "weight_decay": 0.3})


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_added_groups_of_two_ranks(rank: int) -> None:
    """The same holds with several ranks, where DDP knows the trained parameters from the start."""
    cut = Cut(kill=12, every=1, continues_at=(1, 4))
    assert_ranks_continue(cut, rank=rank, module=lambda: Unfreezes(freezes=False), max_epochs=3)


class TwoRates(Net):
    """Trains two layers at different rates."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.layers[0].parameters())},
            {"params": list(self.layers[3].parameters()), "lr": 0.1},
        ]
        return torch.optim.Adam(groups, lr=0.01)


class Swapper(Callback):
    """Swaps the parameters of the two groups at the start of each epoch but the first."""

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        one, other = trainer.optimizers[0].param_groups
        if trainer.current_epoch:
            one["params"], other["params"] = other["params"], one["params"]


@pytest.mark.parametrize("options", [{"every_n_train_steps": 1}, {"overhead_budget": 1.0}])
def test_an_exception_beside_a_change(options: dict[str, Any]) -> None:
    """A save never has groups that its moment did not have: an earlier autosave stays, and the hook runs again."""
    users = lambda: [Swapper()]  # noqa: E731
    [cost] = assert_exact(users, RaiseAt("on_train_epoch_start", 1), module=TwoRates, max_epochs=3, options=options)
    assert (cost.exit_code, cost.epoch) == (1, 0)


class Strange(Net):
    """Adds a new tensor to its optimizer after the first epoch."""

    def on_train_epoch_end(self) -> None:
        [optimizer] = self.trainer.optimizers
        if self.current_epoch == 0:
            optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})


def test_a_tensor_that_is_no_parameter_is_refused() -> None:
    """A tensor that can't be found again is named, instead of torch's error about the number of groups."""
    with pytest.raises(
        NotTheSame, match=r"Optimizer 0 \(Adam\) can't be restored: while training, it was given a tensor"
    ):
        assert_exact(list, KillAt(7), module=Strange)


class Replaces(Net):
    """Continues with another optimizer in the second epoch, or with another scheduler."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.what == "optimizer":
            self.trainer.strategy.optimizers = [torch.optim.AdamW(self.parameters(), lr=0.01)]
        elif self.current_epoch == 1 and self.what == "optimizer of a scheduler":
            self.trainer.strategy.optimizers = [torch.optim.Adam(self.parameters(), lr=0.01)]
        elif self.current_epoch == 1 and self.what == "scheduler":
            [config], [optimizer] = self.trainer.lr_scheduler_configs, self.trainer.optimizers
            config.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("optimizer", "optimizer 0 became AdamW, but .* creates Adam"),
        ("optimizer of a scheduler", r"scheduler 0 became \w+ of another optimizer, but .* creates \w+ of optimizer 0"),
        ("scheduler", "scheduler 0 became ExponentialLR"),
    ],
)
def test_a_replaced_optimizer_is_refused(what: str, reason: str) -> None:
    """An optimizer or scheduler that training has replaced is named, and not loaded into the original kind."""
    with pytest.raises(NotTheSame, match=f"while training, {reason}"):
        assert_exact(list, KillAt(6), module=lambda: Replaces(what))


@pytest.mark.parametrize("what", ["optimizer of a scheduler", "scheduler", ""])
def test_a_replaced_optimizer_is_warned_about(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first save that finds it says once that no resume from there is exact, and what to do."""
    fit_net([FaultTolerance(every_n_train_steps=1)], tmp_path, module=Replaces(what), max_epochs=2)
    told = [one for one in caplog.messages if "A resume from now on can't be exact: while training" in one]
    assert len(told) == bool(what)
    assert all("Use both from the start" in one for one in told)
