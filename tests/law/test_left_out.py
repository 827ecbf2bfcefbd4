"""The law for what users leave out of a checkpoint: it continues as if it were there, or the resume is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_faulttolerant.testing import KillAt, NotTheSame, assert_resumes_exactly
from tests.runs import LATER_SHORT_EPOCH, Net, assert_continues, fit_net


class Drops(Net):
    """Saves only some of its trained layers."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = {name: value for name, value in checkpoint["state_dict"].items() if "layers.0" not in name}
        checkpoint["state_dict"] = kept


class Halves(Net):
    """Saves its weights with half of their bits."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {
            name: value.half() if value.is_floating_point() else value
            for name, value in checkpoint["state_dict"].items()
        }


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


@pytest.mark.parametrize("module", [Drops, Halves, Taught])
def test_left_out_weights_that_training_changes_are_carried(module: type[Net]) -> None:
    """A dropped layer, rounded weights, and a teacher continue."""
    assert_continues(LATER_SHORT_EPOCH, module=module)


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
