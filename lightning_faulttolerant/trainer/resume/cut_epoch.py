"""Epochs that a fit closed in their middle, since it had reached ``max_steps``: the rest of them can't be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.position import EPOCH_END, TrainerPosition

REMEDY = (
    "Resume from a checkpoint that ModelCheckpoint saved after a batch (with every_n_train_steps): it continues in "
    "the middle of the epoch"
)


def reason(path: str, position: TrainerPosition) -> str:
    """Return why the checkpoint `path` can't be trained further."""
    return (
        f"{path} comes from a fit that ended in the middle of an epoch, after batch {position.batch}. The epoch was "
        "closed there, so the rest of it can't be trained"
    )


def would_be_lost(
    trainer: Trainer, position: TrainerPosition, checkpoint: Mapping[str, Any], saved: Mapping[str, Any]
) -> bool:
    """Return whether `trainer` would train on without the rest of an epoch that ``max_steps`` had ended.

    Args:
        trainer: The trainer that runs the fit.
        position: Where the checkpoint was saved.
        checkpoint: The checkpoint.
        saved: What the trainer was when it was saved, the part ``trainer`` of the state.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if position.where != EPOCH_END or progress is None or saved.get("should_stop"):
        return False
    # A batch that on_train_batch_start skipped, with the rest of its epoch, is begun and never completed.
    is_whole = progress["current"]["completed"] < progress["current"]["ready"] or progress["is_last_batch"]
    is_cut = not is_whole and position.batch < saved.get("num_training_batches", 0)
    return is_cut and (trainer.max_steps < 0 or trainer.max_steps > position.global_step)
