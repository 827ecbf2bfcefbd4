"""Loggers in a replay: those of Lightning that write files write below its directory, all others receive nothing.

A logger that opens a run in its constructor, such as Comet's, has done so before.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_faulttolerant.trainer.files import compat as files
from lightning_faulttolerant.trainer.replay import compat

_SILENT = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")


def silence(trainer: Trainer, directory: str) -> None:
    """Let nothing reach the files and services that a trainer's loggers log to. Call it before they begin.

    Args:
        trainer: The trainer of the loggers.
        directory: The directory of the replay.
    """
    for number, logger in enumerate(trainer.loggers):
        if isinstance(logger, (CSVLogger, TensorBoardLogger)):
            files.set_save_dir(logger, os.path.join(directory, "logs", str(number)))
            compat.begin_again(logger)
        elif not getattr(logger, "is_silent_in_replay", False):
            logger.__class__ = _silent(type(logger))


def save_logs(trainer: Trainer) -> None:
    """Write what the loggers of files keep in memory."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, (CSVLogger, TensorBoardLogger)):
            logger.save()


def _silent(kind: Any) -> Any:
    """Return a class like that of a logger, whose methods do nothing. Scripts keep the object, and look at it."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    methods: dict[str, Any] = dict.fromkeys(_SILENT, nothing)
    experiment = property(lambda self: DummyLogger().experiment)
    namespace = {**methods, "experiment": experiment, "is_silent_in_replay": True, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**namespace, "__doc__": kind.__doc__})
