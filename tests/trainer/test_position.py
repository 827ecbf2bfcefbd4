"""A position says where a state was taken, and which of two positions is further."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_faulttolerant.trainer.position import (
    BATCH_END,
    BOUNDARY,
    EPOCH_END,
    EPOCH_START,
    FINISHED,
    VALIDATION,
    VALIDATION_END,
    TrainerPosition,
)


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
