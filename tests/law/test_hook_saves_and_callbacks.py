"""Checkpoints that other code saves in a hook, next to Lightning callbacks that keep state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler

from tests.callbacks import Unfreezing, swa
from tests.hook_saves import SavingCheckpoint, assert_continues_from, saver
from tests.modules import Backbone, NormNet, PlainNet
from tests.runs import Net

Users = Callable[[], list[Callback]]


def accumulation() -> list[Callback]:
    """Return a schedule that changes the factor in every epoch."""
    return [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})]


def stopping() -> list[Callback]:
    """Return a callback that requests a stop after the second epoch."""
    return [EarlyStopping("val_loss", patience=1, min_delta=100.0)]


def unfreezing() -> list[Callback]:
    """Return a callback that unfreezes at the starts of the second and the third epoch."""
    return [Unfreezing()]


CASES: dict[str, tuple[Users, type[LightningModule], dict[str, Any]]] = {
    "accumulation": (accumulation, Net, {"max_epochs": 3}),
    "unfreezing": (unfreezing, Backbone, {"max_epochs": 3}),
    "stopping": (stopping, PlainNet, {"max_epochs": 6, "min_epochs": 4}),
    "averages": (swa, NormNet, {"max_epochs": 4}),
}


@pytest.mark.parametrize("in_front", [True, False], ids=["in front", "after"])
@pytest.mark.parametrize(
    ("name", "hook", "at"),
    [
        ("accumulation", "on_train_epoch_start", 1),
        ("accumulation", "on_train_epoch_end", 0),
        ("unfreezing", "on_train_epoch_start", 1),
        ("unfreezing", "on_train_epoch_end", 1),
        ("stopping", "on_train_epoch_end", 1),
        ("averages", "on_train_epoch_start", 1),
        ("averages", "on_train_epoch_start", 4),
        ("averages", "on_train_epoch_end", 1),
        ("averages", "on_train_epoch_end", 3),
        ("averages", "on_train_batch_end", 22),
    ],
)
def test_saved_beside(name: str, hook: str, at: int, in_front: bool) -> None:
    """A callback's hook takes effect once, whether the save comes before it or after it."""
    users, module, arguments = CASES[name]
    both = (lambda: [saver(hook, at), *users()]) if in_front else (lambda: [*users(), saver(hook, at)])
    assert_continues_from(hook, users=both, module=module, **arguments)


@pytest.mark.parametrize("at", [0, 1])
def test_schedulers_step_after_a_save_at_the_end_of_an_epoch(at: int) -> None:
    """A scheduler that steps once an epoch does so after the save, as in Lightning, and only once."""
    assert_continues_from(
        "on_train_epoch_end",
        users=lambda: [saver("on_train_epoch_end", at, kind=SavingCheckpoint)],
        module=PlainNet,
        max_epochs=3,
        enable_checkpointing=True,
    )
