"""The files of ModelCheckpoints: after a resume each has the name that it would have had without the interruption.

ModelCheckpoint gives a file another name (``-v1``) if its name is taken. Files that the killed process wrote after the
resumed step count as missing, and are overwritten. Files that it removed after that step count as existing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant.trainer.compat import running_hook
from lightning_faulttolerant.trainer.files import compat
from lightning_faulttolerant.trainer.files.roots import Moves, absolute
from lightning_faulttolerant.trainer.patches import Method, Patches

# Hooks that are called again when a run continues from a file that was saved in them.
_AGAIN = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")

_PATHS = ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path", compat.LAST_SAVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    """A save of a ModelCheckpoint that is in progress.

    Args:
        callback: The callback that saves.
        hook: The hook that it saves in.
        step: The optimizer step that it saves at.
        before: The state of all files right before the save, from which the hook repeats all of it.
    """

    callback: ModelCheckpoint
    hook: str
    step: int
    before: Mapping[str, object]


class _Listing:
    """The files in the directories of ModelCheckpoints. It is asked at each boundary, and looks only after a change."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}
        self._found_for: object = None
        self._num_changes = 0

    def note_change(self) -> None:
        """Note that a file was written or removed."""
        self._num_changes += 1

    def files(
        self,
        callbacks: Sequence[ModelCheckpoint],
        select: Callable[[Mapping[str, list[str]]], dict[str, list[str]]],
    ) -> dict[str, list[str]]:
        """Return the names of the files by directory.

        Args:
            callbacks: The ModelCheckpoints.
            select: Takes what exists, and returns what counts.
        """
        current = (self._num_changes, [(callback.dirpath, callback.last_model_path) for callback in callbacks])
        if self._found_for != current:
            self._found, self._found_for = select(_listed(_directories(callbacks))), current
        return self._found


class _FilesThen:
    """The files that existed when the state of a resumed run was taken.

    Args:
        found: Their names, by directory.
        is_ours: Tells whether a file that did not exist then may have been written by this run since.
    """

    def __init__(self, found: Mapping[str, list[str]] = {}, is_ours: Callable[[str], bool] = lambda path: True) -> None:
        self.found = found
        self._is_ours = is_ours
        self._others: dict[str, bool] = {}

    def would_be_there(self, path: str, *, is_there: bool) -> bool:
        """Return whether a file that this process has not touched would exist without the interruption."""
        directory, name = os.path.split(path)
        is_in_listed = directory in self.found
        while directory not in self.found:
            if directory == os.path.dirname(directory):
                return is_there
            directory, name = os.path.split(directory)
        was_there = name in self.found[directory]
        if is_there and not was_there and self._is_anothers(path):
            return True
        return was_there and (is_in_listed or is_there)

    def _is_anothers(self, path: str) -> bool:
        """Return whether another run in the same directory wrote a file that is new."""
        if path not in self._others:
            self._others[path] = not self._is_ours(path)
        return self._others[path]


class _UsersDirectories:
    """The directories that the user gave to ModelCheckpoints which save elsewhere now."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self.have_moved = False
        """Whether the directories of this start differ from those of the first one."""

    def note(self, callback: ModelCheckpoint) -> None:
        """Note the directory of `callback`, before it is changed."""
        self._undo.callback(setattr, callback, "dirpath", callback.dirpath)

    def forget(self) -> None:
        """Keep the changes."""
        self._undo.pop_all()

    def put_back(self) -> None:
        """Give each ModelCheckpoint the user's directory again."""
        self._undo.close()


class CheckpointFiles:
    """The files that a trainer's ModelCheckpoints have written, and what they know of them.

    Args:
        trainer: The trainer of the callbacks.
        patches: Removes our part from them later.
    """

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        self._patches = patches
        self._listing = _Listing()
        self._then = _FilesThen()
        self._touched: set[str] = set()
        """The files that this process has written or removed since it resumed."""
        self._save: _Save | None = None
        self._is_saving = False
        self._file = ""
        """The file that was written last, or is being written."""
        self._own_file: tuple[str, int] | None = None
        """The file that the run resumed from, if its ModelCheckpoint is to write it again, and the step to do so."""
        self._users_directories = _UsersDirectories()
        self.anchor: str | None = None
        """The directory for the first start's relative paths, if this start works in another directory."""
        self.notes: list[str] = []
        """Where a ModelCheckpoint saves, if the directories of this start differ."""

    def move(self, moves: Moves, state: Mapping[str, object]) -> None:
        """Let each ModelCheckpoint save where it did at the first start. Call it before they are set up.

        Args:
            moves: The directories that differ from the first start's.
            state: The result of `state_dict`.
        """
        self._users_directories.have_moved = bool(moves.roots)
        for callback in self._callbacks() if moves.roots else ():
            dirpath = callback.dirpath
            self._users_directories.note(callback)
            if dirpath is not None and str(dirpath) not in self._absolute(state)["found"]:
                callback.dirpath = moves.first(str(dirpath)) or dirpath

    def make_absolute(self, states: dict[str, Any]) -> None:
        """Make the paths in a checkpoint's ModelCheckpoint states absolute, in place."""
        for key in {callback.state_key for callback in self._callbacks()} & states.keys():
            if self.anchor is not None and isinstance(states[key], Mapping):
                states[key] = _absolute(states[key], self.anchor)

    def _absolute(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a result of `state_dict` with all paths absolute."""
        if self.anchor is None:
            return state
        found = {_full(path, self.anchor): names for path, names in state["found"].items()}
        callbacks = {key: _absolute(own, self.anchor) for key, own in state["callbacks"].items()}
        return {**state, "found": found, "callbacks": callbacks}

    def settle(self) -> None:
        """Keep the changes: the run has resumed."""
        self._users_directories.forget()

    def put_back(self) -> None:
        """Give each ModelCheckpoint the user's directory again: the run has not resumed."""
        self._users_directories.put_back()

    def _note_places(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for callback in self._callbacks():
            then, now = states.get(callback.state_key, {}).get("dirpath"), absolute(str(callback.dirpath))
            name = type(callback).__qualname__
            if then is not None and absolute(then) != now:
                self.notes.append(f"{name} now saves to {now}; earlier files are in {then}")
            elif then is not None and self._users_directories.have_moved:
                self.notes.append(f"{name} continues in {now}, where the first start of the run saved")

    def follow(self) -> None:
        """Begin to notice when a checkpoint is written or removed."""
        around = self._patches.around
        around(self._trainer, "save_checkpoint", self._write_or_remove)
        around(self._trainer.strategy, "remove_checkpoint", self._write_or_remove)
        for callback in self._callbacks():
            around(callback, compat.SAVE_TOPK, partial(self._save_by, callback, True))
            around(callback, compat.SAVE_LAST, partial(self._save_by, callback, False))

    def _write_or_remove(self, write_or_remove: Method, filepath: object, *args: object, **kwargs: object) -> None:
        if not self._is_there_already(filepath):
            self._file = str(filepath)
            write_or_remove(filepath, *args, **kwargs)
        self._listing.note_change()
        self._touched.add(str(filepath))

    def _is_there_already(self, path: object) -> bool:
        """Return whether this is the file that the run resumed from, about to be written again."""
        own, here = self._own_file, (_real(path), self._trainer.global_step)
        if own is not None and (own == here or own[1] != here[1]):
            self._own_file = None
        return own == here

    def _save_by(
        self, callback: ModelCheckpoint, is_first: bool, save: Method, *args: object, **kwargs: object
    ) -> None:
        """Keep the state before a ModelCheckpoint saves; with ``save_last`` it saves twice."""
        if is_first or not self._keeps_saving(callback):
            self._begin_save(callback)
        self._is_saving = True
        try:
            save(*args, **kwargs)
        finally:
            self._is_saving = False

    def _keeps_saving(self, callback: ModelCheckpoint) -> bool:
        step, save = self._trainer.global_step, self._save
        is_of_this_step = save is not None and save.callback is callback and save.step == step
        return is_of_this_step and compat.saved_last_at(callback) == step

    def _begin_save(self, callback: ModelCheckpoint) -> None:
        hook, _ = running_hook(self._trainer)
        before = self.state_dict()
        again = compat.model_checkpoint_state_to_save_again(callback, hook)
        before["callbacks"][callback.state_key] = again
        step = self._trainer.global_step
        self._save = _Save(callback=callback, hook=hook, step=step, before={**before, "saves_again_at": step})

    def saves_in_its_hook(self, callback: Callback | None) -> bool:
        """Return whether `callback` is a ModelCheckpoint in the middle of a save that its hook can repeat."""
        return self._saves_now() is not None and self._saves_now() is callback

    def _saves_now(self) -> ModelCheckpoint | None:
        if not self._is_saving or self._save is None or self._save.hook not in _AGAIN:
            return None
        hook, callback = running_hook(self._trainer)
        return self._save.callback if callback is self._save.callback and hook == self._save.hook else None

    def state_dict(self) -> dict[str, Any]:
        """Return the existing files, by directory, and the internal state of each ModelCheckpoint."""
        if self._save is not None and self._saves_now() is not None:
            return dict(self._save.before)
        callbacks = self._callbacks()
        found = self._listing.files(callbacks, self._as_uninterrupted)
        states = {callback.state_key: compat.model_checkpoint_state(callback) for callback in callbacks}
        if self._is_saving and self._save is not None and self._save.hook not in _AGAIN:
            # This hook ends the fit, and is not called again.
            ended = states[self._save.callback.state_key]
            ended["attributes"] = compat.as_saved(ended["attributes"], self._file, self._trainer.global_step)
        return {"found": found, "callbacks": states}

    def _as_uninterrupted(self, found: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Return the files that would exist without the interruption."""
        return {
            directory: [
                name
                for name in sorted({*names, *self._then.found.get(directory, ())})
                if self._would_be_there(os.path.join(directory, name), is_there=name in names)
            ]
            for directory, names in found.items()
        }

    def resume(
        self,
        state: Mapping[str, Any],
        path: str,
        *,
        is_own: bool = True,
        is_ours: Callable[[str], bool] = lambda path: True,
    ) -> None:
        """Make each ModelCheckpoint see the files as they were when `state` was taken.

        Call it when the callbacks are set up and before one of them saves.

        Args:
            state: The result of `state_dict`.
            path: The checkpoint that `state` was in.
            is_own: Whether the existing files are this run's; if not, only that checkpoint counts as missing.
            is_ours: Tells whether a file that did not exist then may have been written by this run since.
        """
        if "saves_again_at" in state:
            self._own_file = (_real(path), state["saves_again_at"])
        elif not is_own:
            return
        if is_own:
            state = self._absolute(state)
            self._note_places(state.get("callbacks", {}))
        self._then = _FilesThen(state["found"] if is_own else {}, is_ours)
        for callback in self._callbacks():
            self._patches.around(callback, "file_exists", self._file_exists)

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the internal state of each ModelCheckpoint. Call it after ``on_train_start``."""
        state = self._absolute(state)
        for callback in self._callbacks():
            if callback.state_key in state["callbacks"]:
                compat.load_model_checkpoint(callback, state["callbacks"][callback.state_key])

    def _file_exists(self, file_exists: Method, filepath: object, trainer: Trainer) -> bool:
        if self._own_file is not None and _real(filepath) == self._own_file[0]:
            return False
        return self._would_be_there(str(filepath), is_there=file_exists(filepath, trainer))

    def _would_be_there(self, path: str, *, is_there: bool) -> bool:
        """Return whether a file of that name would exist without the interruption."""
        # The creation of a link is not noticed, but its callback knows it.
        known = self._touched | {callback.last_model_path for callback in self._callbacks()}
        if any(other == path or other.startswith(f"{path}/") for other in known):
            return is_there
        return self._then.would_be_there(path, is_there=is_there)

    def _callbacks(self) -> list[ModelCheckpoint]:
        found = self._trainer.checkpoint_callbacks
        return [callback for callback in found if isinstance(callback, ModelCheckpoint)]


def _absolute(state: Mapping[str, Any], anchor: str) -> dict[str, object]:
    """Return a state of a ModelCheckpoint, Lightning's or ours, with all paths absolute."""
    made = dict(state)
    for name, value in state.items():
        if name in _PATHS and isinstance(value, str):
            made[name] = _full(value, anchor)
        elif name == "best_k_models":
            made[name] = {_full(path, anchor): score for path, score in value.items()}
        elif name in ("own", "attributes"):
            made[name] = _absolute(value, anchor)
    return made


def _full(path: str, anchor: str) -> str:
    return path if not path or "://" in path else os.path.normpath(os.path.join(anchor, path))


def _real(path: Any) -> str:
    return str(path) if "://" in str(path) else os.path.realpath(path)


def _directories(callbacks: Iterable[ModelCheckpoint]) -> set[str]:
    """Return the directories that the callbacks write to, including subdirectories from metrics with a slash."""
    directories = set()
    for callback in callbacks:
        if callback.dirpath is None:
            continue
        directories.add(str(callback.dirpath))
        paths = (callback.best_model_path, callback.last_model_path, *callback.best_k_models)
        directories |= {os.path.dirname(path) for path in paths if path}
    return directories


def _listed(directories: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the entries in each directory; none for a directory that does not exist."""
    return {directory: compat.entries_of(directory) for directory in sorted(directories)}
