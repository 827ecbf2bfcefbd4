"""The configuration that LightningCLI saves to the log directory: a run that continues finds its own file there.

LightningCLI takes it for another run's, and refuses to begin. So the file is moved aside, saved again, and removed if
both are the same: the configuration that a run began with is never lost.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Method, Patches


def let_config_be_there(trainer: Trainer, patches: Patches) -> None:
    """Let the callbacks of LightningCLI save where they did before. Call it on rank 0, before they are set up.

    Args:
        trainer: The trainer of the callbacks.
        patches: Removes our part from them later.
    """
    for callback in config_callbacks(trainer):
        patches.around(callback, "setup", functools.partial(_set_up, callback))


def config_callbacks(trainer: Trainer) -> list[Any]:
    """Return the callbacks of LightningCLI that save its configuration."""
    cli = sys.modules.get("lightning.pytorch.cli")  # takes a second to import, and needs jsonargparse
    callbacks = [] if cli is None else compat.callbacks(trainer)
    return [callback for callback in callbacks if cli is not None and isinstance(callback, cli.SaveConfigCallback)]


def _set_up(callback: Any, setup: Method, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    if callback.already_saved or callback.overwrite or not callback.save_to_log_dir:
        setup(trainer, *args, **kwargs)
    else:
        _save_again(callback, trainer, lambda: setup(trainer, *args, **kwargs))


def _save_again(callback: Any, trainer: Trainer, save: Any) -> None:
    """Call `save`, which refuses to begin if its file exists, with that file moved aside."""
    directory = _log_dir(trainer)
    path = os.path.join(directory or "", callback.config_filename)
    file_system = get_filesystem(path)
    if directory is None or not file_system.isfile(path):
        save()
        return
    aside = _unused(file_system, path)
    file_system.mv(path, aside)
    saving = Patches()
    # The configuration may consist of several files, and those exist too.
    saving.around(callback.parser, "save", _overwrite)
    try:
        save()
    finally:
        saving.undo()
        if not file_system.isfile(path):
            file_system.mv(aside, path)
    if file_system.isfile(aside) and file_system.cat_file(aside) == file_system.cat_file(path):
        file_system.rm_file(aside)
    elif file_system.isfile(aside):
        tell(f"The configuration is another one than before: that is in {aside}, this one in {path}.")


def _overwrite(save: Any, *args: Any, **kwargs: Any) -> None:
    save(*args, **{**kwargs, "overwrite": True})


def _log_dir(trainer: Trainer) -> str | None:
    """Return ``trainer.log_dir``, which is a collective, on this rank alone."""
    if not trainer.loggers:
        return trainer.default_root_dir
    logger = trainer.loggers[0]
    return logger.log_dir if isinstance(logger, (CSVLogger, TensorBoardLogger)) else logger.save_dir


def _unused(file_system: Any, path: str) -> str:
    stem, extension = os.path.splitext(path)
    number = 1
    while file_system.exists(f"{stem}-{number}{extension}"):
        number += 1
    return f"{stem}-{number}{extension}"
