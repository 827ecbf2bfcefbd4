"""A position says where a state was taken, and which of two positions is further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.trainer.position import (
    BATCH_END,
    BOUNDARY,
    EPOCH_END,
    EPOCH_START,
    FINISHED,
    VALIDATION,
    VALIDATION_END,
    TrainerPosition,
    position_of,
    progress_of,
)
from tests.runs import fit_net


def at(where: str, **arguments: Any) -> TrainerPosition:
    """Return a position, by default in epoch 1."""
    return TrainerPosition(where=where, **{"epoch": 1, "batch": 3, "global_step": 11, **arguments})


@pytest.mark.parametrize(
    ("where", "resumable", "text"),
    [
        (BOUNDARY, True, "before batch 3 of epoch 1"),
        (VALIDATION, True, "at the validation run after batch 3 of epoch 1"),
        (FINISHED, True, "after the end of the fit"),
        (EPOCH_START, True, "at the start of epoch 1"),
        (BATCH_END, True, "after the step of batch 2 of epoch 1"),
        (VALIDATION_END, True, "at the end of the validation run after batch 3 of epoch 1"),
        (EPOCH_END, True, "at the end of epoch 1"),
        ("on_train_start", False, "at batch 3 of epoch 1"),
    ],
)
def test_place_in_words(where: str, resumable: bool, text: str) -> None:
    """Each place has its words; a run can't continue from any other hook."""
    assert str(at(where)) == text
    assert str(at(where, hook="on_x")) == f"{text}, saved in on_x"
    assert at(where).is_resumable is resumable


class Positions(Callback):
    """Notes the position at the start and the end of each training batch, and the progress of a checkpoint there."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, int]] = []
        self.progress: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        position = position_of(trainer, BOUNDARY)
        self.found.append((position.epoch, position.batch, position.global_step))
        self.progress.append(progress_of({"loops": {"fit_loop": trainer.fit_loop.state_dict()}}, None))


def test_position_counts_consumed_batches(tmp_path: Path) -> None:
    """Inside a batch, it is not consumed yet; the progress counts it as begun, grows by one each, and spans epochs."""
    positions = Positions()
    fit_net([positions], tmp_path, limit_train_batches=3, accumulate_grad_batches=2, limit_val_batches=0)
    assert positions.found == [(0, 0, 0), (0, 1, 0), (0, 2, 1), (1, 0, 2), (1, 1, 2), (1, 2, 3)]
    assert positions.progress == [1, 2, 3, 4, 5, 6]


def test_finished_is_furthest_and_nothing_is_first() -> None:
    """A finished fit is after every batch; a checkpoint without loops, from other tools, is at the beginning."""
    part = {"position": at(FINISHED).state_dict()}
    assert progress_of({}, part) == float("inf")
    assert progress_of({}, None) == 0
    assert progress_of({}, {"position": at(BOUNDARY).state_dict()}) == 0
