"""All files of a run besides its autosaves, as one state, and our part of an existing checkpoint file.

A run that continues finds the configuration that LightningCLI saved to the log directory. LightningCLI takes it for
another run's, and refuses to begin. So the file is moved aside, saved again, and removed if both are the same: the
configuration that a run began with is never lost.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.joined_file import JoinedFile, opened_whole
from lightning_faulttolerant.checkpoint.schema import MARK, CheckpointPart, part_in
from lightning_faulttolerant.storage.store import is_url, local_copy
from lightning_faulttolerant.trainer.compat import callbacks as callbacks_of
from lightning_faulttolerant.trainer.files import compat
from lightning_faulttolerant.trainer.files.checkpoints import CheckpointFiles
from lightning_faulttolerant.trainer.files.experiments import Experiments
from lightning_faulttolerant.trainer.files.loggers import LoggerFiles
from lightning_faulttolerant.trainer.files.roots import DEFAULT_ROOT_DIR, WORKING_DIRECTORY, Moves, roots_of
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Method, Patches

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_log = logging.getLogger(__name__)


def load(path: str) -> dict[str, Any]:
    """Return the content of a checkpoint, here or remote; a local one is read only as far as it is used.

    For a directory of shards, it is the content outside the shards.
    """
    content: dict[str, object]
    if not is_url(path) and os.path.isdir(path):
        path = os.path.join(path, METADATA_NAME)
    with opened_whole(path, _copy) as file:
        if is_url(path) or isinstance(file, JoinedFile):
            content = torch.load(file, map_location="cpu", weights_only=True)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return content


def _copy(path: str) -> IO[bytes]:
    try:
        return local_copy(path)
    except (FileNotFoundError, IsADirectoryError):
        if not is_url(path):
            raise
        return local_copy(f"{path.rstrip('/')}/{METADATA_NAME}")


def part_of(path: str | None) -> CheckpointPart | None:
    """Return our part of a checkpoint, or ``None`` if it has none or can't be read."""
    if path is None:
        return None
    try:
        return part_in(load(path), path)
    except Exception as error:  # noqa: BLE001 - torch.load raises a different error for each kind of damage
        _log.debug("%s can't be read: %s", path, error)
        return None


def are_of_one_run(part: Mapping[str, object] | None, other: Mapping[str, object] | None) -> bool:
    """Return whether two checkpoints with these parts were written by processes of one run."""
    return part is not None and other is not None and MARK in part and part[MARK] == other.get(MARK)


class RunFiles:
    """The files that loggers and ModelCheckpoints have written.

    They stay together: if a start has other directories than the first one, settings on the user's objects lead back to
    the directories of the first one. They remain after the fit, but are undone if the run doesn't resume.

    Args:
        trainer: The trainer of the loggers and callbacks.
        patches: Removes our part from them later.
    """

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        self._patches = patches
        self._loggers = LoggerFiles(trainer, patches)
        self.experiments = Experiments(trainer, patches)
        """The runs of loggers that don't write files themselves."""
        self._checkpoints = CheckpointFiles(trainer, patches)
        self.mark = uuid.uuid4().hex
        """Tells the files of this run, of all its processes, from those of others; draws no random number."""
        self.continues = False
        """Whether the existing files belong to the run that continues."""
        self._roots = roots_of(trainer)
        self._undo = contextlib.ExitStack()
        self.moved_roots: Mapping[str, str] = {}
        """The first start's directories that differ from this start's, by name."""

    @property
    def notes(self) -> list[str]:
        """What a user should know about files that could not continue, or that continue in another directory."""
        lost = (*self._loggers.notes, *self.experiments.notes)
        return [*lost, *self._loggers.moved, *self.experiments.moved, *self._checkpoints.notes]

    def follow(self) -> None:
        """Begin to notice writes."""
        self._checkpoints.follow()

    def state_dict(self) -> dict[str, object]:
        """Return what was written so far."""
        written = {"loggers": self._loggers.state_dict(), "checkpoints": self._checkpoints.state_dict()}
        return {**written, "roots": dict(self._roots), "experiments": self.experiments.state_dict()}

    @property
    def has_config(self) -> bool:
        """Whether LightningCLI saves its configuration."""
        return bool(config_callbacks(self._trainer))

    def let_config_be_there(self) -> None:
        """Let LightningCLI save its configuration where it did before. Call it before callbacks are set up."""
        let_config_be_there(self._trainer, self._patches)

    def flush(self) -> None:
        """Write the values that loggers keep in memory."""
        self._loggers.flush()

    def resume_loggers(
        self, state: Mapping[str, Any], *, later: Sequence[Mapping[str, Any] | None] = (), autosave: str = ""
    ) -> None:
        """Let loggers continue, and everything write where it did. Call it before loggers begin their files.

        Args:
            state: The result of `state_dict`.
            later: The same of later fits, which keep their part of the files; ``None`` if a state is unknown.
            autosave: An autosave of the run.
        """
        kept = None if None in later else {logger["log_dir"] for files in later if files for logger in files["loggers"]}
        moves = Moves(state.get("roots"), self._roots, autosave=autosave)
        self.go_to_roots(moves.roots)
        self._checkpoints.move(moves, state["checkpoints"])
        self.experiments.resume(state.get("experiments", ()))  # W&B first: it checks what writes to TensorBoard
        self._loggers.resume(state["loggers"], kept=kept, moves=moves)

    def go_to_roots(self, roots: Mapping[str, str]) -> None:
        """Give the trainer the ``default_root_dir`` of the first start, and resolve relative paths as it did.

        Args:
            roots: The first start's directories that differ from this start's.
        """
        if not roots or self.moved_roots:
            return
        self.moved_roots = roots
        self._roots.update(roots)
        self._checkpoints.anchor = roots.get(WORKING_DIRECTORY)
        if DEFAULT_ROOT_DIR in roots:
            self._undo.callback(compat.set_default_root_dir(self._trainer, roots[DEFAULT_ROOT_DIR]))

    def make_absolute(self, states: dict[str, object]) -> None:
        """Let the ModelCheckpoints load absolute paths if theirs are relative to the first start's directory.

        Args:
            states: The callbacks' states in a checkpoint, by state key; changed in place.
        """
        self._checkpoints.make_absolute(states)

    def settle(self) -> None:
        """Keep the changes: the run has resumed."""
        self._undo.pop_all()
        self._loggers.settle()
        self.experiments.settle()
        self._checkpoints.settle()
        for note in (*self._loggers.notes, *self.experiments.notes):
            _log.warning("%s.", note)

    def put_back(self) -> None:
        """Undo the changes: the run has not resumed."""
        with self._undo:
            self._undo.callback(self._checkpoints.put_back)
            self._undo.callback(self._loggers.put_back)

    def resume_checkpoints(self, state: Mapping[str, Any], path: str) -> None:
        """Let ModelCheckpoints continue. Call it when they are set up and before one saves.

        Args:
            state: The result of `state_dict`.
            path: The checkpoint that `state` was in.
        """
        self._checkpoints.resume(state["checkpoints"], path, is_own=self.continues, is_ours=self._is_ours)

    def _is_ours(self, path: str) -> bool:
        """Return whether a file may be this run's: the mark of another run says that it is not."""
        part = part_of(path)
        return part is None or part.get(MARK) == self.mark

    def saves_in_its_hook(self, callback: Callback | None) -> bool:
        """Return whether `callback` is a ModelCheckpoint in the middle of a save that its hook can repeat."""
        return self._checkpoints.saves_in_its_hook(callback)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that only the callbacks know. Call it after ``on_train_start``."""
        self._checkpoints.load(state["checkpoints"])


def let_config_be_there(trainer: Trainer, patches: Patches) -> None:
    """Let the callbacks of LightningCLI save where they did before. Call it on rank 0, before they are set up.

    Args:
        trainer: The trainer of the callbacks.
        patches: Removes our part from them later.
    """
    for callback in config_callbacks(trainer):
        patches.around(callback, "setup", functools.partial(_set_up, callback))


def config_callbacks(trainer: Trainer) -> list[object]:
    """Return the callbacks of LightningCLI that save its configuration."""
    cli = sys.modules.get("lightning.pytorch.cli")  # takes a second to import, and needs jsonargparse
    callbacks = [] if cli is None else callbacks_of(trainer)
    return [callback for callback in callbacks if cli is not None and isinstance(callback, cli.SaveConfigCallback)]


def _set_up(callback: Any, setup: Method, trainer: Trainer, *args: object, **kwargs: object) -> None:
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
        tell(f"The configuration has changed. The earlier one is in {aside}, this one in {path}.")


def _overwrite(save: Any, *args: object, **kwargs: object) -> None:
    save(*args, **{**kwargs, "overwrite": True})


def _log_dir(trainer: Trainer) -> str | None:
    """Return ``trainer.log_dir``, which is a collective, on this rank alone."""
    if not trainer.loggers:
        return trainer.default_root_dir
    logger = trainer.loggers[0]
    return logger.log_dir if isinstance(logger, (CSVLogger, TensorBoardLogger)) else logger.save_dir


def _unused(file_system: AbstractFileSystem, path: str) -> str:
    stem, extension = os.path.splitext(path)
    number = 1
    while file_system.exists(f"{stem}-{number}{extension}"):
        number += 1
    return f"{stem}-{number}{extension}"
