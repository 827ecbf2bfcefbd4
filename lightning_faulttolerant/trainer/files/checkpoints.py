"""The files of ModelCheckpoints: after a resume each has the name that it would have had without the interruption.

ModelCheckpoint gives a file another name (``-v1``) if its name is taken. What the killed process wrote after the
resumed step is not there as far as the run knows, and is written over; what it has removed since still is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant.trainer.compat import running_hook
from lightning_faulttolerant.trainer.files import compat
from lightning_faulttolerant.trainer.files.roots import Moves, absolute
from lightning_faulttolerant.trainer.patches import Patches

# Called once more when a run continues after a file that was saved in them.
_AGAIN = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")

_PATHS = ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path", compat.LAST_SAVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    """A save of a ModelCheckpoint that is under way.

    Args:
        callback: Whose.
        hook: In which hook.
        step: At which optimizer step.
        before: The state of all files right before it, from which the hook does all of it again.
    """

    callback: ModelCheckpoint
    hook: str
    step: int
    before: Mapping[str, Any]


class CheckpointFiles:
    """What the ModelCheckpoints of a trainer have written, and what they know of it.

    Args:
        trainer: Whose callbacks.
        patches: What takes our part off them again.
    """

    def __init__(self, trainer: Trainer, patches: Patches) -> None:
        self._trainer = trainer
        self._patches = patches
        self._found: dict[str, list[str]] = {}
        self._found_for: Any = None
        self._num_changes = 0
        self._then: Mapping[str, list[str]] = {}
        self._is_ours: Callable[[str], bool] = lambda path: True
        self._others: dict[str, bool] = {}
        self._touched: set[str] = set()
        """What this process has written or removed since it resumed."""
        self._save: _Save | None = None
        self._is_saving = False
        self._file = ""
        """The one that was written last, or is being written."""
        self._own_file: tuple[str, int] | None = None
        """The file that the run resumed from, if its ModelCheckpoint is to write it once more, and at which step."""
        self._undo: list[Callable[[], None]] = []
        self._has_moved = False
        self.anchor: str | None = None
        """What relative paths of the first start are relative to, if this start works in another directory."""
        self.notes: list[str] = []
        """Where a ModelCheckpoint saves, if the directories of this start are others."""

    def move(self, moves: Moves, state: Mapping[str, Any]) -> None:
        """Let each ModelCheckpoint save where it did at the first start; to be called before they are set up.

        Args:
            moves: Which directories are others than at the first start.
            state: What `state_dict` gave.
        """
        self._has_moved = bool(moves.roots)
        for callback in self._callbacks() if self._has_moved else ():
            dirpath = callback.dirpath
            self._undo.append(functools.partial(setattr, callback, "dirpath", dirpath))
            if dirpath is not None and str(dirpath) not in self._absolute(state)["found"]:
                callback.dirpath = moves.first(str(dirpath)) or dirpath

    def make_absolute(self, states: dict[str, Any]) -> None:
        """Make paths absolute in the ModelCheckpoints' states of a checkpoint, in place."""
        for key in {callback.state_key for callback in self._callbacks()} & states.keys():
            if self.anchor is not None and isinstance(states[key], Mapping):
                states[key] = _absolute(states[key], self.anchor)

    def _absolute(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what `state_dict` gave with all paths absolute."""
        if self.anchor is None:
            return state
        found = {_full(path, self.anchor): names for path, names in state["found"].items()}
        callbacks = {key: _absolute(own, self.anchor) for key, own in state["callbacks"].items()}
        return {**state, "found": found, "callbacks": callbacks}

    def settle(self) -> None:
        """Let it be so: the run has resumed."""
        self._undo.clear()

    def put_back(self) -> None:
        """Let each ModelCheckpoint have the directory that the user gave it: the run has not resumed."""
        while self._undo:
            self._undo.pop()()

    def _note_places(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for callback in self._callbacks():
            then, now = states.get(callback.state_key, {}).get("dirpath"), absolute(str(callback.dirpath))
            name = type(callback).__qualname__
            if then is not None and absolute(then) != now:
                self.notes.append(f"{name} saves to {now} now; what was saved so far is in {then}")
            elif then is not None and self._has_moved:
                self.notes.append(f"{name} continues in {now}, where the first start of the run saved")

    def follow(self) -> None:
        """Notice from here on when a checkpoint is written or removed."""
        self._patches.wrap(self._trainer, "save_checkpoint", self._wrap)
        self._patches.wrap(self._trainer.strategy, "remove_checkpoint", self._wrap)
        for callback in self._callbacks():
            self._patches.wrap(callback, compat.SAVE_TOPK, self._wrap_save(callback, is_first=True))
            self._patches.wrap(callback, compat.SAVE_LAST, self._wrap_save(callback, is_first=False))

    def _wrap(self, original: Any) -> Any:
        def write_or_remove(filepath: Any, *args: Any, **kwargs: Any) -> None:
            if not self._is_there_already(filepath):
                self._file = str(filepath)
                original(filepath, *args, **kwargs)
            self._num_changes += 1
            self._touched.add(str(filepath))

        return write_or_remove

    def _is_there_already(self, path: Any) -> bool:
        """Return whether this is the file that the run resumed from, about to be written once more."""
        own, here = self._own_file, (_real(path), self._trainer.global_step)
        if own is not None and (own == here or own[1] != here[1]):
            self._own_file = None
        return own == here

    def _wrap_save(self, callback: ModelCheckpoint, *, is_first: bool) -> Callable[[Any], Any]:
        """Return what keeps the state right before a ModelCheckpoint saves: its hook saves twice with ``save_last``."""

        def wrap(original: Any) -> Any:
            def save(*args: Any, **kwargs: Any) -> None:
                if is_first or not self._goes_on_saving(callback):
                    self._begin_save(callback)
                self._is_saving = True
                try:
                    original(*args, **kwargs)
                finally:
                    self._is_saving = False

            return save

        return wrap

    def _goes_on_saving(self, callback: ModelCheckpoint) -> bool:
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
        """Return whether `callback` is a ModelCheckpoint in the middle of a save that its hook can do once more."""
        return self._saves_now() is not None and self._saves_now() is callback

    def _saves_now(self) -> ModelCheckpoint | None:
        if not self._is_saving or self._save is None or self._save.hook not in _AGAIN:
            return None
        hook, callback = running_hook(self._trainer)
        return self._save.callback if callback is self._save.callback and hook == self._save.hook else None

    def state_dict(self) -> dict[str, Any]:
        """Return which files there are, by directory, and what each ModelCheckpoint keeps to itself."""
        if self._save is not None and self._saves_now() is not None:
            return dict(self._save.before)
        callbacks = self._callbacks()
        # Listed again only when something was written since: this is asked for at each boundary.
        current = (self._num_changes, [(callback.dirpath, callback.last_model_path) for callback in callbacks])
        if self._found_for != current:
            self._found, self._found_for = self._as_uninterrupted(_listed(_directories(callbacks))), current
        states = {callback.state_key: compat.model_checkpoint_state(callback) for callback in callbacks}
        if self._is_saving and self._save is not None and self._save.hook not in _AGAIN:
            # It ends the fit, and is not called again.
            ended = states[self._save.callback.state_key]
            ended["attributes"] = compat.as_saved(ended["attributes"], self._file, self._trainer.global_step)
        return {"found": self._found, "callbacks": states}

    def _as_uninterrupted(self, found: Mapping[str, list[str]]) -> dict[str, list[str]]:
        """Return what there would be without the interruption."""
        return {
            directory: [
                name
                for name in sorted({*names, *self._then.get(directory, ())})
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
        """Let each file that is asked for be there, or not, as it was when `state` was taken.

        To be called when the callbacks are set up and before one of them saves.

        Args:
            state: What `state_dict` gave.
            path: The checkpoint that it was in.
            is_own: Whether the files that are there are this run's; if not, only that checkpoint is not to be there.
            is_ours: Whether a file that was not there then may have been written by a process of this run since.
        """
        if "saves_again_at" in state:
            self._own_file = (_real(path), state["saves_again_at"])
        elif not is_own:
            return
        if is_own:
            state = self._absolute(state)
            self._note_places(state.get("callbacks", {}))
        self._then, self._is_ours = state["found"] if is_own else {}, is_ours
        for callback in self._callbacks():
            self._patches.wrap(callback, "file_exists", self._wrap_file_exists)

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what each ModelCheckpoint keeps to itself; to be called after ``on_train_start``."""
        state = self._absolute(state)
        for callback in self._callbacks():
            if callback.state_key in state["callbacks"]:
                compat.load_model_checkpoint(callback, state["callbacks"][callback.state_key])

    def _wrap_file_exists(self, original: Any) -> Any:
        def file_exists(filepath: Any, trainer: Trainer) -> bool:
            if self._own_file is not None and _real(filepath) == self._own_file[0]:
                return False
            return self._would_be_there(str(filepath), is_there=original(filepath, trainer))

        return file_exists

    def _would_be_there(self, path: str, *, is_there: bool) -> bool:
        """Return whether there would be a file of that name without the interruption."""
        # Nobody is told of a link that is made, but its callback knows it.
        known = self._touched | {callback.last_model_path for callback in self._callbacks()}
        if any(other == path or other.startswith(f"{path}/") for other in known):
            return is_there
        directory, name = os.path.split(path)
        is_in_listed = directory in self._then
        while directory not in self._then:
            if directory == os.path.dirname(directory):
                return is_there
            directory, name = os.path.split(directory)
        was_there = name in self._then[directory]
        if is_there and not was_there and self._is_anothers(path):
            return True
        return was_there and (is_in_listed or is_there)

    def _is_anothers(self, path: str) -> bool:
        """Return whether a file that has come since was written by another run in the same directory."""
        if path not in self._others:
            self._others[path] = not self._is_ours(path)
        return self._others[path]

    def _callbacks(self) -> list[ModelCheckpoint]:
        found = self._trainer.checkpoint_callbacks
        return [callback for callback in found if isinstance(callback, ModelCheckpoint)]


def _absolute(state: Mapping[str, Any], anchor: str) -> dict[str, Any]:
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
    """Return where the callbacks write, and where below it they have: metrics with a slash name a subdirectory."""
    directories = set()
    for callback in callbacks:
        if callback.dirpath is None:
            continue
        directories.add(str(callback.dirpath))
        paths = (callback.best_model_path, callback.last_model_path, *callback.best_k_models)
        directories |= {os.path.dirname(path) for path in paths if path}
    return directories


def _listed(directories: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of what is in each directory; a directory that is not there has nothing in it."""
    found: dict[str, list[str]] = {}
    for directory in sorted(directories):
        file_system = get_filesystem(directory)
        file_system.invalidate_cache(directory)
        there = file_system.isdir(directory)
        paths = file_system.ls(directory, detail=False) if there else []
        found[directory] = sorted(os.path.basename(str(path).rstrip("/")) for path in paths)
    return found
