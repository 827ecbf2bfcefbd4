"""Nothing of the run is touched: what a replay writes goes below its own directory, or nowhere.

These replacements stay until the process ends, since hooks for exceptions may save, too. Loggers of Lightning that
write files write below the replay's directory, all others receive nothing. A logger that opens a run in its
constructor, such as Comet's, has done so before.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_faulttolerant.records.replay import ReplayRequest
from lightning_faulttolerant.storage.store import is_url
from lightning_faulttolerant.trainer.compat import callbacks
from lightning_faulttolerant.trainer.files import compat as files
from lightning_faulttolerant.trainer.files.compat import set_default_root_dir
from lightning_faulttolerant.trainer.files.run_files import config_callbacks
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.replay import compat
from lightning_faulttolerant.trainer.settings.options import Options

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


def _silent(kind: type) -> Any:
    """Return a class like that of a logger, whose methods do nothing. Scripts keep the object, and look at it."""

    def nothing(self: object, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    methods: dict[str, object] = dict.fromkeys(_SILENT, nothing)
    experiment = property(lambda self: DummyLogger().experiment)
    namespace = {**methods, "experiment": experiment, "is_silent_in_replay": True, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**namespace, "__doc__": kind.__doc__})


_NEVER = timedelta(days=36_500)
_MARK = "is_protected_by_replay"


def protect(trainer: Trainer, request: ReplayRequest) -> None:
    """Keep a trainer from writing to the files of the run. Call it on each rank, before loggers begin their files.

    Args:
        trainer: The trainer that begins a fit or an evaluation.
        request: The request for the replay.
    """
    if hasattr(trainer.strategy, _MARK):  # it has run another fit
        return
    setattr(trainer.strategy, _MARK, True)
    patches = Patches()
    silence(trainer, request.directory)
    patches.around(trainer.strategy, "save_checkpoint", partial(_save_below, request.directory))
    patches.around(trainer.strategy, "remove_checkpoint", partial(_remove_below, request.directory))
    for callback in filter(compat.can_link, callbacks(trainer)):
        patches.around(callback, compat.LINK_CHECKPOINT, partial(_link_below, request.directory))
    for saves_config in config_callbacks(trainer):
        vars(saves_config)["already_saved"] = True


def redirect(trainer: Trainer, request: ReplayRequest) -> None:
    """Give a trainer the directory of the replay as its ``default_root_dir``, once the run is found.

    Args:
        trainer: The trainer.
        request: The request for the replay.
    """
    root = request.path("root")
    os.makedirs(root, exist_ok=True)
    set_default_root_dir(trainer, root)


def without_saves(options: Options) -> Options:
    """Return the options of a callback for a replay: it saves nothing, and nothing stops it, not even a long step.

    Args:
        options: The options that the script passed.
    """
    return replace(
        options,
        every_n_train_steps=None,
        train_time_interval=_NEVER,
        keep_every=None,
        record=None,
        attribute=False,
        async_save=False,
        save_on_exception=False,
        auto_resume=True,
        deadline=None,
        stop_signals=(),
        hang="off",  # a user in the debugger takes any time
        hang_timeout=None,
    )


def _is_below(path: object, directory: str) -> bool:
    text = str(path)
    return not is_url(text) and os.path.realpath(text).startswith(f"{os.path.realpath(directory)}/")


def _save_below(
    directory: str, save: Method, checkpoint: object, filepath: object, *args: object, **kwargs: object
) -> None:
    if _is_below(filepath, directory):
        save(checkpoint, filepath, *args, **kwargs)


def _remove_below(directory: str, remove: Method, filepath: object) -> None:
    if _is_below(filepath, directory):
        remove(filepath)


def _link_below(directory: str, link: Method, trainer: Trainer, filepath: object, linkpath: str) -> None:
    if _is_below(os.path.dirname(linkpath), directory):
        link(trainer, filepath, linkpath)
