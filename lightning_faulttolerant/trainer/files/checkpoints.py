"""The files of ModelCheckpoints: behind a resume each has the name that it would have had without the interruption.

ModelCheckpoint gives a file another name (``-v1``) if its name is taken. What the killed process wrote behind the
resumed step is not there as far as the run knows, and is written over; what it has removed since still is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant.trainer.files import compat
from lightning_faulttolerant.trainer.patches import Patches


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
        self._touched: set[str] = set()
        """What this process has written or removed since it resumed."""

    def follow(self) -> None:
        """Notice from here on when a checkpoint is written or removed."""
        self._patches.wrap(self._trainer, "save_checkpoint", self._wrap)
        self._patches.wrap(self._trainer.strategy, "remove_checkpoint", self._wrap)

    def _wrap(self, original: Any) -> Any:
        def write_or_remove(filepath: Any, *args: Any, **kwargs: Any) -> None:
            original(filepath, *args, **kwargs)
            self._num_changes += 1
            self._touched.add(str(filepath))

        return write_or_remove

    def state_dict(self) -> dict[str, Any]:
        """Return which files there are, by directory, and what each ModelCheckpoint keeps to itself."""
        callbacks = self._callbacks()
        # Listed anew only when something was written since: this is asked for at each boundary.
        current = (self._num_changes, [(callback.dirpath, callback.last_model_path) for callback in callbacks])
        if self._found_for != current:
            self._found, self._found_for = self._as_uninterrupted(_listed(_directories(callbacks))), current
        states = {callback.state_key: compat.model_checkpoint_state(callback) for callback in callbacks}
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

    def resume(self, state: Mapping[str, Any]) -> None:
        """Let each file that is asked for be there, or not, as it was when `state` was taken.

        To be called when the callbacks are set up and before one of them saves.
        """
        self._then = state["found"]
        for callback in self._callbacks():
            self._patches.wrap(callback, "file_exists", self._wrap_file_exists)

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what each ModelCheckpoint keeps to itself; to be called behind ``on_train_start``."""
        for callback in self._callbacks():
            if callback.state_key in state["callbacks"]:
                compat.load_model_checkpoint(callback, state["callbacks"][callback.state_key])

    def _wrap_file_exists(self, original: Any) -> Any:
        def file_exists(filepath: Any, trainer: Trainer) -> bool:
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
        return was_there and (is_in_listed or is_there)

    def _callbacks(self) -> list[ModelCheckpoint]:
        found = self._trainer.checkpoint_callbacks
        return [callback for callback in found if isinstance(callback, ModelCheckpoint)]


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
