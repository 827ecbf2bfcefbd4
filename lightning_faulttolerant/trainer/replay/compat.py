"""Private names of Lightning that a replay uses, checked on 2.5.6 to 2.6.6, with what breaks without each."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

LOGGER_SEAMS = {"_experiment": "a replay does not add to files that a logger began before the fit"}
MODEL_CHECKPOINT_SEAMS = {"_link_checkpoint": "a replay does not replace the link of save_last='link'"}
LINK_CHECKPOINT = "_link_checkpoint"


def begin_again(logger: Any) -> None:
    """Let a logger of files begin new ones."""
    logger._experiment = None


def can_link(callback: object) -> bool:
    """Return whether a callback is a ModelCheckpoint, which may replace a link."""
    return isinstance(callback, ModelCheckpoint)
