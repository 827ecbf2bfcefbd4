"""Which autosaves are trusted. Objects that ``weights_only=True`` would refuse are unpickled only from trusted ones."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from typing import Any, final

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.ranks import check
from lightning_faulttolerant.checkpoint.schema import KEY, PICKLED, RANKS
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.trust import Packed, classes_in, lines_to_allow, unpack, why_not_trusted
from lightning_faulttolerant.checkpoint.verify import load_path, unsafe_paths
from lightning_faulttolerant.errors import UnsafeCheckpointError
from lightning_faulttolerant.state.objects.leaves import has_pickles, unpickled
from lightning_faulttolerant.state.rng import rng_state, set_rng_state
from lightning_faulttolerant.storage.store import is_url, local_path
from lightning_faulttolerant.trainer.process import OBJECTS
from lightning_faulttolerant.trainer.settings.environment import TRUST_VARIABLE
from lightning_faulttolerant.trainer.settings.options import Options

_log = logging.getLogger(__name__)

_GRANT = f"pass FaultTolerance(trust_autosaves=True) or set {TRUST_VARIABLE}=1"


@final
class Trust:
    """Decides which objects may be in autosaves, and which autosaves may be unpickled.

    Args:
        options: The callback's options: whether the user grants or forbids it, and whether a refusal is an error.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._known: set[str] = set()
        self._has_warned = False

    def why_not(self, path: str) -> str | None:
        """Return why an autosave, or a directory of autosaves, is not trusted, or ``None`` if it is."""
        if self._options.trust_autosaves is not None:
            return None if self._options.trust_autosaves else "trust_autosaves forbids it"
        reasons = map(why_not_trusted, _files_of(path) or [path])
        return next((reason for reason in reasons if reason is not None), None)

    def is_trusted_series(self, series: AutosaveSeries) -> bool:
        """Return whether autosaves in the series are trusted now."""
        return self._why_not_in(os.fspath(series.directory)) is None

    def _why_not_in(self, directory: str) -> str | None:
        """Return why a directory of autosaves is not trusted. Create the directory if it does not exist."""
        if not is_url(directory):
            os.makedirs(local_path(directory), exist_ok=True)
        return self.why_not(directory)

    def unpickled(self, state: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """Return the state of a rank, with the objects unpickled that its object state holds as bytes.

        Raises:
            UnsafeCheckpointError: If there are such bytes, and the checkpoint is not trusted.
        """
        objects = state.get(OBJECTS) or {}
        if not has_pickles(objects):
            return state
        reason = self.why_not(path)
        if reason is not None:
            raise UnsafeCheckpointError(
                f"{path} is not trusted: {reason}. It holds parts of the object state as bytes, and unpickling them "
                f"can run any code. If you trust everyone who can write there, {_GRANT}."
            )
        return {**state, OBJECTS: unpickled(objects)}

    def check(self, packed: Packed, checkpoint: Mapping[str, object], directory: str) -> None:
        """Refuse to write objects that a resume could not load. Call this before the checkpoint is written.

        Args:
            packed: Lightning's checkpoint, with the objects that would not load packed as bytes.
            checkpoint: The checkpoint to write.
            directory: The directory to write to.

        Raises:
            UnsafeCheckpointError: If a value would not load, or, under ``strict``, only from a trusted directory.
        """
        _refuse_unsafe(checkpoint, packed.failures)
        new = packed.pool.keys() - self._known
        if not new:
            return
        self._known |= new
        reason = self._why_not_in(directory)
        if reason is None:
            return
        text = _refusal(packed, reason)
        if self._options.strict:
            raise UnsafeCheckpointError(text)
        _log.warning("%s\nBecause strict is off, the run is saved anyway. Its next start needs this trust.", text)

    def check_engines_files(self, path: str, *, is_saving: bool = False) -> None:
        """Refuse an autosave with files of DeepSpeed's engine, which unpickles them, unless it is trusted.

        Args:
            path: The autosave, or the directory of those that are about to be written.
            is_saving: Whether it is the latter. Without ``strict``, it is only a warning then.

        Raises:
            UnsafeCheckpointError: If it is not trusted.
        """
        reason = self._why_not_in(path) if is_saving else self.why_not(path)
        if reason is None:
            return
        text = (
            f"{path} is not trusted: {reason}. DeepSpeed unpickles the files of its engine, which can run any code. If "
            f"you trust everyone who can write there, {_GRANT}."
        )
        if not is_saving or self._options.strict:
            raise UnsafeCheckpointError(text)
        if not self._has_warned:
            _log.warning("%s\nBecause strict is off, the run is saved anyway. Its next start needs this trust.", text)
        self._has_warned = True

    def written(self, pool: Mapping[str, object], path: str, *, is_first: bool, has_pickles: bool = False) -> None:
        """Let no other user write to an autosave that holds objects as bytes. Check that the first one can be loaded.

        Args:
            pool: The objects.
            path: The autosave.
            is_first: Whether it is the first of the fit.
            has_pickles: Whether other code than ours unpickles it.

        Raises:
            CheckpointError: If the first one can't be loaded.
        """
        if (pool or has_pickles) and not is_url(path):
            for place in (path, *_files_of(path)):
                if os.path.exists(place):
                    os.chmod(place, os.stat(place).st_mode & ~(stat.S_IWGRP | stat.S_IWOTH) & 0o7777)
        if is_first:
            checkpoint = load_path(path)
            for rank in range(len(checkpoint[KEY][RANKS])):  # the bytes have come over the network
                check(checkpoint[KEY], rank)
            if pool and self.why_not(path) is None:
                drawn = rng_state()
                unpack(checkpoint, checkpoint[KEY][PICKLED])
                set_rng_state(drawn)

    def restore(self, checkpoint: dict[str, object], pool: Mapping[str, object] | None, path: str, **more: Any) -> None:
        """Restore the objects that were kept as bytes.

        Args:
            checkpoint: The checkpoint that Lightning restores from.
            pool: The objects.
            path: The autosave that holds them.
            more: As in `unpack`.

        Raises:
            UnsafeCheckpointError: If there are any objects, and the autosave is not trusted.
            CheckpointError: If an object can't be created again.
        """
        if not pool:
            return
        reason = self.why_not(path)
        if reason is not None:
            raise UnsafeCheckpointError(
                f"{path} is not trusted: {reason}. It holds objects as bytes, and unpickling them can run any code:\n"
                f"{_listed(pool)}\n"
                f"If you trust everyone who can write there, {_GRANT}. If nobody else has written there, allow only "
                "yourself to write (chmod go-w)."
            )
        unpack(checkpoint, pool, **more)


def _files_of(path: str) -> list[str]:
    """Return the files and folders in an autosave that is a directory, and none for any other."""
    directory = local_path(path)
    if is_url(path) or not os.path.exists(os.path.join(directory, METADATA_NAME)):
        return []
    inside = ((root, name) for root, folders, files in os.walk(directory) for name in (*folders, *files))
    return sorted(os.path.join(root, name) for root, name in inside)


def _refuse_unsafe(checkpoint: Mapping[str, object], failures: Mapping[str, str]) -> None:
    paths = unsafe_paths(checkpoint)
    if paths:
        named = [f"{path} ({failures[path]})" if path in failures else path for path in paths]
        raise UnsafeCheckpointError(
            "These keys of the checkpoint would not load again with torch.load(weights_only=True), so this run could "
            f"not be resumed: {', '.join(named)}. Let state_dict, on_save_checkpoint, or save_hyperparameters return "
            "numbers, strings, tensors, lists, and dicts, or objects that can be pickled."
        )


def _refusal(packed: Packed, reason: str) -> str:
    lines = lines_to_allow(packed.values)
    allow = "" if lines is None else "\nOr allow the classes before the fit:\n\n    import torch\n    "
    return (
        "These keys of the checkpoint hold objects that torch.load(weights_only=True) refuses:\n"
        f"{_listed(packed.pool)}\n"
        f"A resume unpickles them only if nobody else can write there, but {reason}. Allow only yourself to write "
        "there (chmod go-w, umask 022), or save elsewhere: pass FaultTolerance(dirpath=...). Or, if you trust "
        f"everyone who can write there, {_GRANT}." + allow + "\n    ".join(lines or ())
    )


def _listed(pool: Mapping[str, object]) -> str:
    return "\n".join(f"  {place}: {kind}" for place, kind in classes_in(pool).items())
