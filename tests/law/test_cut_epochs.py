"""A fit that ``max_steps`` ended in the middle of an epoch is trained on only from where the rest of it still comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import NotExactError
from tests.data_sets import NoisyDataset, Unsized
from tests.loader.loops import seed
from tests.runs import Net, fit_net

CLOSED = r"ended in the middle of an epoch, after batch 3. The epoch was closed there.*every_n_train_steps"


class Skips(Net):
    """Skips the rest of an epoch from its third batch on."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def fit(directory: Path, *, path: Path | None = None, ours: Any = None, **arguments: Any) -> Trainer:
    """Fit with a ModelCheckpoint that saves at the end of each epoch, and after each batch into another folder."""
    seed(3)
    at_epochs = ModelCheckpoint(directory / "epochs", filename="{epoch}-{step}", save_top_k=-1)
    at_batches = ModelCheckpoint(directory / "batches", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [FaultTolerance() if ours is None else ours, at_epochs, at_batches]
    made = {name: arguments[name]() for name in ("train", "module") if name in arguments}
    arguments = {"enable_checkpointing": True, "max_epochs": -1, "limit_val_batches": 0, **arguments, **made}
    return fit_net(callbacks, directory, ckpt_path=path, **arguments)


def weights(directory: Path, name: str) -> Any:
    """Return the weights in a file."""
    return torch.load(directory / f"{name}.ckpt", weights_only=True)["state_dict"]


def assert_continues(
    directory: Path, name: str, first: dict[str, int], whole: dict[str, int], **arguments: Any
) -> None:
    """Fit up to the limit `first`, then from the file `name` to the limit `whole`; the weights are those of one fit."""
    to = fit(directory / "whole", **whole, **arguments).global_step
    fit(directory, **first, **arguments)
    ours = FaultTolerance()
    trainer = fit(directory, path=directory / f"{name}.ckpt", ours=ours, **whole, **arguments)
    assert ours.resume_report is not None
    assert ours.resume_report.is_exact
    assert trainer.global_step == to
    expected = weights(directory / "whole", f"batches/step={to}")
    found = weights(directory, f"batches/step={to}")
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def unsized() -> Any:
    """Return a loader of 5 batches that has no length."""
    return Unsized(NoisyDataset(20), batch_size=4, shuffle=True)


@pytest.mark.parametrize("arguments", [{}, {"limit_train_batches": 4}, {"train": unsized}])
def test_file_of_a_closed_epoch_is_refused_if_more_steps_follow(arguments: dict[str, Any], tmp_path: Path) -> None:
    """With more steps, the rest of the epoch would be lost: the error says so, and what to resume from."""
    fit(tmp_path, max_steps=3, **arguments)
    for more in ({"max_steps": 9}, {"max_steps": -1, "max_epochs": 3}):
        with pytest.raises(NotExactError, match=CLOSED):
            fit(tmp_path, path=tmp_path / "epochs/epoch=0-step=3.ckpt", **{**arguments, **more})


def test_file_of_a_closed_epoch_continues_with_the_next_if_not_strict(tmp_path: Path) -> None:
    """If not strict, the next epoch follows, and the report says what is lost."""
    fit(tmp_path, max_steps=3)
    ours = FaultTolerance(strict=False)
    path = tmp_path / "epochs/epoch=0-step=3.ckpt"
    trainer = fit(tmp_path, path=path, ours=ours, max_steps=5)
    assert (trainer.current_epoch, trainer.global_step) == (2, 5)
    assert ours.resume_report is not None
    assert [reason for reason in ours.resume_report.not_exact if "ended in the middle of an epoch" in reason]


@pytest.mark.parametrize("train", [None, unsized])
def test_file_that_a_batch_saved_continues_in_the_middle(train: Any, tmp_path: Path) -> None:
    """The file of the last step, saved before its epoch was closed, gives the rest of the epoch."""
    arguments = {} if train is None else {"train": train}
    assert_continues(tmp_path, "batches/step=3", {"max_steps": 3}, {"max_steps": 8}, **arguments)


@pytest.mark.parametrize("train", [None, unsized])
def test_file_of_an_epoch_that_was_whole_continues(train: Any, tmp_path: Path) -> None:
    """If the last step is the last of its epoch, nothing is lost."""
    arguments = {} if train is None else {"train": train}
    assert_continues(tmp_path, "epochs/epoch=0-step=5", {"max_steps": 5}, {"max_steps": 8}, **arguments)


def test_file_of_an_epoch_that_a_hook_ended_continues(tmp_path: Path) -> None:
    """Where on_train_batch_start skips the rest of each epoch, the uninterrupted fit lacks it, too."""
    assert_continues(tmp_path, "epochs/epoch=0-step=2", {"max_epochs": 1}, {"max_epochs": 2}, module=Skips)


def test_file_of_a_closed_epoch_ends_again_with_as_many_steps(tmp_path: Path) -> None:
    """With the same limit nothing follows, so nothing is lost."""
    fit(tmp_path, max_steps=3)
    ours = FaultTolerance()
    trainer = fit(tmp_path, path=tmp_path / "epochs/epoch=0-step=3.ckpt", ours=ours, max_steps=3)
    assert trainer.global_step == 3
