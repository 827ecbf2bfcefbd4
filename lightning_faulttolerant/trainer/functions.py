"""The functions of a Trainer: ``fit``, ``validate``, ``test``, and ``predict``, and the loop of each evaluation."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

FIT = "fit"


def function_of(trainer: Trainer) -> str:
    """Return the name of the function that runs."""
    return FIT if trainer.state.fn is None else str(trainer.state.fn.value)


def stage_of(trainer: Trainer) -> str:
    """Return the word for the running evaluation in the names of hooks, as in ``on_test_start``."""
    function = function_of(trainer)
    return function if function in ("test", "predict") else "validation"


def loop_of(trainer: Trainer) -> Any:
    """Return the evaluation loop of the function that runs; for ``fit`` that of its validation runs."""
    function = function_of(trainer)
    if function == "validate":
        return trainer.validate_loop
    if function == "test":
        return trainer.test_loop
    return trainer.predict_loop if function == "predict" else trainer.fit_loop.epoch_loop.val_loop
