"""The law for hooks at the start of a fit that change weights after a checkpoint is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt, NotTheSame
from tests.kills import run_whole_and_killed
from tests.runs import FIRST_EPOCH, Net, assert_continues, assert_exact, fit_net


class StartsFromWeights(Net):
    """Loads weights at each start, and passes a batch through its norm when it creates its optimizer."""

    def configure_optimizers(self) -> Any:
        self.layers(torch.ones(4, 4))
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.layers[0].load_state_dict({"weight": torch.ones(8, 4), "bias": torch.zeros(8)})


def test_hooks_at_the_start_that_change_weights() -> None:
    """Hooks change the weights once, as in the uninterrupted run: the restored weights are put back."""
    assert_continues(FIRST_EPOCH, module=StartsFromWeights)


class LoadsAnother(Net):
    """Saves another weight than its own, loads its own, and sets it at the start if it is to."""

    def __init__(self, *, sets: bool = True) -> None:
        super().__init__()
        self.sets = sets

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["layers.0.weight"] = checkpoint["state_dict"]["layers.0.weight"] / 2

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["layers.0.weight"] = checkpoint["state_dict"]["layers.0.weight"] * 2

    def on_train_start(self) -> None:
        if self.sets:
            self.layers[0].weight.data.fill_(1.0)


@pytest.mark.parametrize("sets", [False, True])
def test_weights_that_are_saved_in_another_form(*, sets: bool) -> None:
    """A hook of the load that undoes one of the save is no change. Our part has the weights that a hook sets."""
    assert_continues(FIRST_EPOCH, module=lambda: LoadsAnother(sets=sets))


class LoadsOtherMomentum(Net):
    """Saves another momentum than its own, loads its own, and resets it at the start if it is to."""

    def __init__(self, *, sets: bool = True) -> None:
        super().__init__()
        self.sets = sets

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.scale(checkpoint["optimizer_states"][0], 0.5)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.scale(checkpoint["optimizer_states"][0], 2.0)

    def scale(self, saved: dict[str, Any], factor: float) -> None:
        saved["state"] = {number: {**one, "exp_avg": one["exp_avg"] * factor} for number, one in saved["state"].items()}

    def on_train_start(self) -> None:
        if self.sets:
            for state in self.trainer.optimizers[0].state.values():
                state["exp_avg"].zero_()


def test_momentum_that_is_saved_in_another_form() -> None:
    """A hook of the load that undoes one of the save is no change; what isn't in the file can't be put back."""
    assert_continues(FIRST_EPOCH, module=lambda: LoadsOtherMomentum(sets=False))
    with pytest.raises(NotTheSame, match=r"has changed .*exp_avg.* after the load of the checkpoint"):
        assert_continues(FIRST_EPOCH, module=LoadsOtherMomentum)


class SetsValues(Net):
    """Sets values of its optimizer, and that of the process in its group, at each start; keeps a tensor of it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []

    def on_train_start(self) -> None:
        [optimizer] = self.trainer.optimizers
        optimizer.param_groups[0].update(lr=0.05, num_seen=0, process=os.getpid())
        for parameter, state in optimizer.state.items():
            state["exp_avg"].zero_()
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            self.held = state["exp_avg_sq"]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        group = self.trainer.optimizers[0].param_groups[0]
        group["num_seen"] += 1
        self.log("seen by group", float(group["num_seen"]))
        assert group["process"] == os.getpid()
        held = getattr(self, "held", None)
        assert held is None or any(held is state["exp_avg_sq"] for state in self.trainer.optimizers[0].state.values())
        return loss

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:  # no two runs end with the same process
            del self.trainer.optimizers[0].param_groups[0]["process"]


class SetsOthers(Callback):
    """Sets values of a scheduler, of Lightning's callbacks, and of its own state; notes when the process started."""

    def __init__(self) -> None:
        self.num_seen, self.began = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"num_seen": self.num_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_seen = state_dict["num_seen"]

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.early_stopping_callback.wait_count = 5

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.num_seen = 0
        trainer.lr_scheduler_configs[0].scheduler.last_epoch = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.num_seen += 1
        module.log("seen", float(self.num_seen))


def test_hooks_at_the_start_that_set_values() -> None:
    """Optimizers, groups, schedulers, and states of callbacks continue with the run's values, tensors in place."""
    stops = lambda: EarlyStopping("val_loss", patience=9, min_delta=9.0)  # noqa: E731
    assert_exact(lambda: [SetsOthers(), stops()], KillAt(7), module=SetsValues)


@pytest.mark.usefixtures("whole_reports")
def test_the_report_names_the_hooks_at_the_start(tmp_path: Path) -> None:
    """Each hook whose changes are undone is named with one of them; one that changes nothing is not."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        fit_net([SetsOthers(), EarlyStopping("val_loss", patience=9, min_delta=9.0), *callbacks], directory,
                module=SetsValues())  # fmt: skip

    [*_, output] = run_whole_and_killed(main, tmp_path, [7]).outputs
    notes = [line for line in output.splitlines() if " note " in line]
    for hook, change in [
        ("SetsValues.on_load_checkpoint", r"checkpoint\.optimizer_states \(and \d+ more\)"),
        ("SetsOthers.on_fit_start", "EarlyStopping.*wait_count from 0 to 5"),
        ("SetsOthers.on_train_start", r"schedulers\[0\]\.last_epoch from 7 to 0"),
        ("SetsOthers.on_train_start", "SetsOthers.num_seen from 7 to 0"),
        ("SetsValues.on_train_start", r"optimizers\[0\]\.param_groups\[0\]\.lr from 0\.0\d+ to 0\.05 \(and \d+ more\)"),
    ]:
        assert any(re.search(f"{hook} has changed {change}", note) for note in notes), output
    assert "process from" not in output


class Resets(Net):
    """Changes in ``on_load_checkpoint`` what a checkpoint has of the run."""

    def __init__(self, change: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self.change = change

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.change(checkpoint)


def _drops(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = []
    del checkpoint["lr_schedulers"]
    checkpoint["callbacks"].clear()


def _changes(checkpoint: dict[str, Any]) -> None:
    [optimizer] = checkpoint["optimizer_states"]
    optimizer["state"][0]["exp_avg"].zero_()
    optimizer["state"][1]["exp_avg"] = torch.zeros_like(optimizer["state"][1]["exp_avg"])
    del optimizer["state"][2]
    optimizer["param_groups"][0]["lr"] = 1.0
    checkpoint["lr_schedulers"][0].update(last_epoch=0, _last_lr=[1.0])
    checkpoint["state_dict"]["layers.0.weight"] = torch.zeros(8, 4)


@pytest.mark.parametrize("change", [_drops, _changes])
def test_hooks_of_the_load(change: Callable[[dict[str, Any]], object]) -> None:
    """The run's own state wins over what a hook makes of an autosave."""
    users = lambda: [EarlyStopping("val_loss", patience=9, min_delta=9.0)]  # noqa: E731
    assert_exact(users, KillAt(7), module=lambda: Resets(change))


@pytest.mark.parametrize(
    ("change", "steps", "has_changed"),
    [(lambda checkpoint: checkpoint.update(optimizer_states=[]), 5, True), (lambda checkpoint: None, 10, False)],
)
def test_hooks_of_the_load_of_a_users_checkpoint(
    change: Callable[[dict[str, Any]], object], steps: int, has_changed: bool, tmp_path: Path
) -> None:
    """With a checkpoint that the user passes, the hook's change is kept, and the report says so."""

    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "own.ckpt")

    fit_net([FaultTolerance(tmp_path / "a"), Saves()], tmp_path, module=Resets(change), max_epochs=1)
    callback = FaultTolerance(tmp_path / "b")
    trainer = fit_net([callback], tmp_path, module=Resets(change), ckpt_path=tmp_path / "own.ckpt")
    assert [int(state["step"]) for state in trainer.optimizers[0].state.values()] == [steps] * 6
    assert callback.resume_report is not None
    line = "Resets.on_load_checkpoint has changed checkpoint.optimizer_states"
    assert any(line in reason for reason in callback.resume_report.not_exact) == has_changed
    assert callback.resume_report.is_exact != has_changed


class LazyNet(Net):
    """Learns its shapes from a first batch, when it creates its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(1))

    def configure_optimizers(self) -> Any:
        self.layers(torch.ones(4, 4))
        return torch.optim.Adam(self.parameters())


def test_lazy_modules() -> None:
    """A module with unknown shapes at its load continues, twice."""
    assert_exact(list, KillAt(3), KillAt(3), module=LazyNet)


class FirstBatchNet(LazyNet):
    """Learns its shapes from the first batch of the training, or of the sanity check."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("num_sanity_steps", [0, 1])
def test_lazy_modules_without_a_shape_at_the_start(num_sanity_steps: int) -> None:
    """A module whose shapes follow from a batch continues after that batch, twice."""
    assert_exact(list, KillAt(1), KillAt(3), module=FirstBatchNet, num_sanity_val_steps=num_sanity_steps)
