"""The best and last files of ModelCheckpoints, which forget them if their directory has changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

_BEST = ("best_model_score", "best_model_path", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path")


def restore_best_models(trainer: Trainer, states: Mapping[str, Any]) -> None:
    """Let each ModelCheckpoint know its best and last files again, even in another directory.

    The default logger takes a new version directory at each start. ModelCheckpoint drops what it knew if its
    ``dirpath`` has changed: it would take the first result after a resume for the best of all.

    Args:
        trainer: The trainer of the callbacks.
        states: The callbacks' states in the checkpoint, by state key.
    """
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if isinstance(callback, ModelCheckpoint) and state and state.get("dirpath") != callback.dirpath:
            for name in _BEST:
                if name in state:
                    setattr(callback, name, state[name])
