"""The law for what users leave out of a checkpoint: it continues as if it were there, or the resume is refused."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn

from lightning_faulttolerant import FaultTolerance, NotExactError
from lightning_faulttolerant.testing import KillAt, NotTheSame, assert_resumes_exactly
from tests.laws.features.checkpoints import Adapts, Drops, Renames
from tests.runs import Net, fit_net


class Taught(Net):
    """Has a teacher that averages its weights, with moving statistics, and that its ``state_dict`` lacks."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(copy.deepcopy(self.layers), nn.BatchNorm1d(1)).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        return {name: value for name, value in found.items() if not name.startswith("teacher.")}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for own, other in zip(self.teacher[0].parameters(), self.layers.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.detach(), alpha=0.1)
        return loss + self.teacher(torch.rand(4, next(self.layers.parameters()).shape[1])).square().mean()


def test_no_weight_is_carried_twice(tmp_path: Path) -> None:
    """A file holds renamed weights once, and a frozen base not at all."""
    saved = {}
    for module in (Renames(), Adapts()):
        path = tmp_path / type(module).__name__
        fit_net([FaultTolerance(path)], tmp_path, module=module, max_epochs=1)
        saved[type(module)] = torch.load(max(path.rglob("*.ckpt")), weights_only=True)
    buffers = saved[Renames]["lightning_faulttolerant"]["ranks"][0]["buffers"]
    weights = saved[Renames]["state_dict"]
    assert [weights[f"old.{name}"].data_ptr() for name in buffers] == [one.data_ptr() for one in buffers.values()]
    assert len(buffers) == len(weights)
    assert not saved[Adapts]["lightning_faulttolerant"]["ranks"][0]["buffers"]


def _empty_inside(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = [{**state, "state": {}} for state in checkpoint["optimizer_states"]]


def _without_momentum(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"]:
        state["state"] = {number: {"step": one["step"]} for number, one in state["state"].items() if number}


def _zeroed(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"]:
        state["state"] = {n: {name: 0 * one for name, one in own.items()} for n, own in state["state"].items()}


def _copied(checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = copy.deepcopy(checkpoint["optimizer_states"])


CHANGES: dict[str, tuple[Any, str]] = {
    "without-optimizers": (
        lambda checkpoint: checkpoint["optimizer_states"].clear(),
        r"optimizers 0: .*30 values before, 0 in the checkpoint",
    ),
    "empty-optimizers": (_empty_inside, r"optimizers 0: .*30 values before, 12 in the checkpoint"),
    "without-momentum": (_without_momentum, r"optimizers 0: .*30 values before, 17 in the checkpoint"),
    "zeros": (_zeroed, r"optimizers 0: .*30 values before, 30 in the checkpoint"),
    "empty-schedulers": (
        lambda checkpoint: checkpoint.update(lr_schedulers=[{}]),
        r"schedulers 0: .*8 values before, 0 in the checkpoint",
    ),
    "callbacks": (
        lambda checkpoint: checkpoint.update(callbacks={}),
        r"callbacks EarlyStopping.*: .*[46] values before, 0 in the checkpoint",
    ),
    "copied": (_copied, ""),
}
"""Changes of a hook, by the name of a checkpoint, and the reason why it can't be resumed exactly, if there is one."""


class SavesOwn(Net):
    """Saves checkpoints of its own, and changes each of them."""

    change: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.change is not None:
            self.change(checkpoint)

    def on_train_epoch_end(self) -> None:
        for name, (self.change, _) in CHANGES.items():
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/{name}.ckpt")
        self.change = None


class ChangedByCallback(SavesOwn):
    """Leaves the changes to a callback that comes first."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Do nothing."""


class Changer(Callback):
    """Changes the checkpoints of `ChangedByCallback`."""

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        if isinstance(module, ChangedByCallback):
            SavesOwn.on_save_checkpoint(module, checkpoint)


@pytest.mark.parametrize("module", [SavesOwn, ChangedByCallback])
def test_states_that_a_hook_changes_in_a_users_checkpoint_are_named(tmp_path: Path, module: type[SavesOwn]) -> None:
    """A resume from a checkpoint of the user's with other states is refused; one that isn't strict reports it."""

    def fit(name: str, ckpt_path: Path | None = None, **options: Any) -> FaultTolerance:
        ours = FaultTolerance(tmp_path / name, **options)
        users = [Changer(), ours, EarlyStopping("val_loss", patience=9)]
        fit_net(users, tmp_path / name, module=module(), max_epochs=1, ckpt_path=ckpt_path)
        return ours

    fit("first")
    for name, (_, reason) in CHANGES.items():
        path = tmp_path / "first" / f"{name}.ckpt"
        with pytest.raises(NotExactError, match=reason) if reason else contextlib.nullcontext():
            fit(f"strict-{name}", path)
    report = fit("lax", tmp_path / "first" / "empty-optimizers.ckpt", strict=False).resume_report
    assert report is not None
    assert [line.partition(":")[0] for line in report.not_exact] == ["optimizers 0"]


def test_left_out_weights_are_carried_through_two_starts() -> None:
    """What a resume has restored is carried again, even if it does not change any more."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=Drops())

    assert_resumes_exactly(fit, [KillAt(3), KillAt(4)], options={"every_n_train_steps": 1})


class Frozen(Taught):
    """Has a layer that is left out and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 1).requires_grad_(False)

    training_step = Net.training_step


def test_left_out_weights_that_differ_in_the_new_process_are_refused() -> None:
    """A frozen layer that is left out is compared, and a run with another one does not continue."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        module = Frozen()
        nn.init.constant_(module.teacher.weight, float(any(directory.rglob("*.ckpt"))))
        return fit_net(callbacks, directory, module=module)

    with pytest.raises(NotTheSame, match=r"teacher\.weight: the checkpoint leaves it out"):
        assert_resumes_exactly(fit, [KillAt(3)], options={"every_n_train_steps": 1})
