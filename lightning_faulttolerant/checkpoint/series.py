"""Keep the autosaves of one run: name them, find the newest that verifies, delete the old ones.

After the first save has returned, an autosave that verified when it was written always exists. This module never
touches a file that it did not write. The files of incidents are next to the autosaves of a fit, never pruned, and never
among those that a resume chooses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from lightning_faulttolerant.checkpoint import autosave_files
from lightning_faulttolerant.checkpoint.autosave_files import (
    AUTOSAVE_NAME,
    BASE_NAME,
    KEPT_FOLDER,
    METADATA_NAME,
    PREDICTIONS_NAME,
    SUPERSEDED_NAME,
    autosave_name,
    bases_in,
    is_kept,
    kept_names,
    leave,
    remove_unused,
    sequence_of,
    superseded_number,
)
from lightning_faulttolerant.checkpoint.increments import Increments
from lightning_faulttolerant.checkpoint.manifest import FileEntry
from lightning_faulttolerant.checkpoint.saving import save_to_file
from lightning_faulttolerant.checkpoint.verify import load_path, read_back, verify_autosave, verify_file
from lightning_faulttolerant.errors import DamagedCheckpointError, NoValidCheckpointError
from lightning_faulttolerant.records.incidents import INCIDENT_NAME, INCIDENTS_FOLDER
from lightning_faulttolerant.storage.local import (
    Listing,
    is_of_this_process,
    is_unchanged_for_long,
    leftovers,
    remove_abandoned,
    target_name,
)
from lightning_faulttolerant.storage.store import Store, is_url, local_path, open_store

_logger = logging.getLogger(__name__)

_LABEL = re.compile(r"[\w.=+-]+")


def _is_still_ours() -> None:
    """Accept every save: the default for callers that keep other processes out by a lock that can't be lost."""


@final
@dataclass(frozen=True, slots=True)
class AutosaveSeries:
    """The autosaves in one directory or below one URL, numbered in the order of saving.

    Each autosave is a file, or a directory that other code writes shards into. Only one process at a time may write
    (``open_lock``), except for the shards.

    Args:
        directory: A path or a URL; created at the first save.
        keep_last: How many to keep, at least 1. With 2, a file that goes bad on the disk costs one interval.
        check: Called before anything is published or deleted; raises if the directory is no longer ours.
        incremental: Whether files contain only the tensors that changed, and refer to a base for the others.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     series = AutosaveSeries(directory, keep_last=2)
        ...     for batch in range(3):
        ...         _ = series.save({"batch": batch}, epoch=0, batch=batch, global_step=batch)
        ...     [os.path.basename(path) for path in series.paths()]
        ['autosave-00000002-epoch=0-batch=1.ckpt', 'autosave-00000003-epoch=0-batch=2.ckpt']
    """

    directory: str | os.PathLike[str]
    keep_last: int = field(default=2, kw_only=True)
    check: Callable[[], None] = field(default=_is_still_ours, kw_only=True)
    incremental: bool = field(default=False, kw_only=True)
    store: Store = field(init=False, repr=False, compare=False)
    _sound: set[str] = field(init=False, repr=False, compare=False, default_factory=set)
    """The autosaves that verified in this process."""
    _committed: set[str] = field(init=False, repr=False, compare=False, default_factory=set)
    """The URLs of the directories that are known to be complete."""
    num_bytes: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    """The size of the autosave that this process wrote last, and of its base if that is new, by its path."""
    _increments: Increments | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}, but must be at least 1: a resume needs a file.")
        object.__setattr__(self, "store", open_store(self.directory))
        if self.incremental:
            increments = Increments(self.store, self.check, num_bases=2)
            object.__setattr__(self, "_increments", increments)

    def save(self, checkpoint: dict[str, Any], *, epoch: int, batch: int, global_step: int, keep: bool = False) -> str:
        """Write an autosave, verify it, and only then delete the ones beyond ``keep_last``.

        A local one is read back. A remote one is compared with the size and the checksum that its store reports.

        Args:
            checkpoint: A dict that ``torch.save`` can write.
            epoch: The epoch that the run is in, from 0.
            batch: The number of finished batches in the epoch.
            global_step: The number of finished optimizer steps; for messages.
            keep: Whether it is never removed.

        Returns:
            The path or URL of the new file.

        Raises:
            OSError: If the file can't be written; the existing autosaves are kept.
            DamagedCheckpointError: If it doesn't verify. It is set aside, and the existing autosaves are kept.
            RunInUseError: If another process has taken over the directory; nothing was changed.
        """
        listing = self.store.listing()
        number = self._next_number(listing)
        self._remove_unused_bases(listing)  # a new one may need the room
        increment = self._increments and self._increments.prepare(checkpoint)
        name = autosave_name(number, epoch=epoch, batch=batch, keep=keep, base=increment and increment.base)
        path = self.store.path(name)
        with self.store.writer(name) as file:
            save_to_file(checkpoint, file) if increment is None else increment.write(file)
            num_bytes = file.tell()
            self.check()
            damage = None if is_url(path) else read_back(file)
        if damage is not None:
            aside = self._set_damaged_aside(name)
            raise DamagedCheckpointError(
                f"The autosave of step {global_step} does not read back as it was written: {damage} It is now {aside}."
                " Earlier autosaves were kept. Check the disk, or save to another one."
            ) from damage
        _logger.debug("Saved step %d to %s", global_step, path)
        if self._increments is not None and increment is not None:
            self._increments.note_written(increment)
            num_bytes += increment.num_bytes_of_new_base
        self._note(name, num_bytes)
        self._prune([*self._autosaves(self.store, listing), name])
        self._remove_unused_bases(listing)
        return path

    def begin_directory(self, *, epoch: int, batch: int, keep: bool = False) -> str:
        """Create an empty directory for the shards of an autosave; it becomes an autosave with `commit_directory`.

        Args:
            epoch: As in `save`.
            batch: As in `save`.
            keep: As in `save`.

        Returns:
            Its path or URL. End it with `commit_directory` or `drop_directory`.

        Raises:
            OSError: If it can't be created.
        """
        name = autosave_name(self._next_number(self.store.listing()), epoch=epoch, batch=batch, keep=keep)
        if not is_url(self.store.url):
            return autosave_files.begin_directory(self.store.path(name))
        autosave_files.begin_in_store(self.store, name)
        return self.store.path(name)

    def commit_directory(self, directory: str, files: dict[str, FileEntry]) -> str:
        """Turn a complete directory of shards into an autosave, and only then delete those beyond ``keep_last``.

        Args:
            directory: The path that `begin_directory` returned.
            files: Sizes and checksums of all files in it.

        Returns:
            The path of the new autosave.

        Raises:
            OSError: If it can't be committed; the existing autosaves are kept.
            DamagedCheckpointError: If the file outside the shards is missing or doesn't verify; the existing autosaves
                are kept.
            RunInUseError: If another process has taken over the directory; nothing was changed.
        """
        is_remote = is_url(self.store.url)
        name = os.path.basename(directory) if is_remote else autosave_files.target_of(directory)
        self.check()
        verify_file(os.path.join(directory, METADATA_NAME))
        if is_remote:
            autosave_files.commit_in_store(self.store, name, files)
        else:
            autosave_files.commit_directory(directory, self.store.path(name), files)
        self._note(name, sum(entry.size_bytes for entry in files.values()))
        try:
            self._prune(self._autosaves(self.store, self.store.listing()))
        except OSError as error:
            if not is_remote:
                raise
            # A store often refuses a request for a moment. The new autosave is there, and the next save tries again.
            _logger.warning("Older autosaves than %s could not be deleted: %s", self.store.path(name), error)
        return self.store.path(name)

    def drop_directory(self, directory: str) -> None:
        """Delete a directory that `begin_directory` created, unless it has become an autosave.

        Args:
            directory: Its path; it may already be gone.

        Raises:
            OSError: If it can't be deleted, or a store can't tell whether it is an autosave. It stays then.
        """
        name = os.path.basename(directory)
        if is_url(self.store.url) and autosave_files.is_committed(self.store, name):
            return  # in a store, an autosave has the name that its directory had from the start
        with contextlib.suppress(FileNotFoundError):
            autosave_files.delete(self.store, name)

    def _next_number(self, listing: Listing) -> int:
        self._remove_leftovers(listing)
        lasting = self._lasting(listing)
        names = (name for _, name in self._all_names(listing))
        known = [*map(_name_in_folder, lasting), *listing.folders, *names]
        sequence = 1 + max(map(sequence_of, known), default=0)
        if lasting and not self._autosaves(self.store, listing):  # they are from a run that began before this one
            self._move_aside(lasting, listing, "earlier-run")
        return sequence

    def load_newest(self, load: Callable[[str], dict[str, Any]] = load_path) -> tuple[str, dict[str, Any]] | None:
        """Load the newest autosave that verifies, in one read; damaged ones that are newer are set aside.

        Args:
            load: Verifies an autosave and loads it.

        Returns:
            Its path or URL and its content (for a directory, the part outside the shards), or None if no autosave was
            ever written.

        Raises:
            NoValidCheckpointError: If there are autosaves, but all are damaged.
            UnsafeCheckpointError: If the newest sound one holds an object that ``weights_only=True`` refuses. The older
                ones would hold it too, so none of them is tried.
            OSError: If a file can't be read for a reason that is not damage.
        """
        damages: dict[str, DamagedCheckpointError] = {}
        found = None
        for name in reversed(self._autosaves(self.store, self.store.listing())):
            try:
                found = self.store.path(name), load(self.store.path(name))
                self._sound.add(name)
                break
            except DamagedCheckpointError as error:
                damages[name] = error
        taken = found[0] if found is not None else "none"
        for name, damage in damages.items():
            aside = self._set_damaged_aside(name)
            _logger.warning("%s It was set aside as %s. Used instead: %s.", damage, aside, taken)
        if found is None:
            self._refuse_to_start_over(list(damages.values()))
        return found

    def paths(self) -> list[str]:
        """List the autosaves that are not set aside.

        Returns:
            Their paths or URLs, oldest first.
        """
        return [self.store.path(name) for name in self._autosaves(self.store, self.store.listing())]

    def set_aside(self, label: str) -> str | None:
        """Move all autosaves into a subdirectory, so that the next run starts without them.

        Args:
            label: The reason. Letters, digits and ``_.=+-``: it becomes part of the directory's name.

        Returns:
            The subdirectory, or None if there is nothing to move.

        Raises:
            OSError: If a file can't be moved.
            ValueError: If the label can't be part of a name.
        """
        if _LABEL.fullmatch(label) is None:
            raise ValueError(f"The label {label!r} can't be part of a name. Use letters, digits and any of _.=+-")
        listing = self.store.listing()
        names = self._in_order_of_leaving(self.store, listing)
        if not names:
            return None
        return self._move_aside([*self._lasting(listing), *names], listing, label)

    def _lasting(self, listing: Listing) -> list[str]:
        """Return what stays when a run has finished, with its folders: kept autosaves, and incidents."""
        incidents = self.store.folder(INCIDENTS_FOLDER).names() if INCIDENTS_FOLDER in listing.folders else []
        found = {
            KEPT_FOLDER: kept_names(self.store, listing),
            INCIDENTS_FOLDER: filter(INCIDENT_NAME.fullmatch, incidents),
        }
        return [f"{folder}/{name}" for folder, names in found.items() for name in names]

    def _move_aside(self, names: list[str], listing: Listing, label: str) -> str:
        self.check()
        number = 1 + max((superseded_number(name) for name in listing.folders), default=0)
        folder = f"superseded-{number:04d}-{label}"
        for name in names:
            autosave_files.rename(self.store, name, f"{folder}/{_name_in_folder(name)}")
        for emptied in (KEPT_FOLDER, INCIDENTS_FOLDER):
            self.store.folder(emptied).remove_if_empty()
        return self.store.path(folder)

    def remove_all(self) -> None:
        """Delete every file that this series wrote, set aside or left over, and the directory if nothing else is in it.

        Autosaves that were saved with ``keep`` stay, but they are no longer in the series. So do incidents, and the
        bases that kept autosaves refer to.

        Raises:
            OSError: If a file can't be deleted.
        """
        listing = self.store.listing()
        self._remove_leftovers(listing, other_hosts=True)
        for store, name in self._all_names(listing):
            if store is self.store or not is_kept(name):  # kept ones of earlier runs stay where they are
                leave(store, name)
        for name in filter(PREDICTIONS_NAME.fullmatch, listing.files):
            self.store.delete(name)
        for store in self._superseded(listing):
            if is_url(store.url):  # a move that was interrupted may have left a part of an autosave
                self._remove_uncommitted(store, store.listing())
            store.remove_if_empty()
        if bases_in(listing.files):
            remove_unused(self.store)
        self.store.remove_if_empty()

    def _note(self, name: str, num_bytes: int) -> None:
        self._sound.add(name)
        self.num_bytes.clear()
        self.num_bytes[self.store.path(name)] = num_bytes

    def _prune(self, names: list[str]) -> None:
        if len(names) <= self.keep_last:
            return
        self.check()
        num_kept = 0
        for name in reversed(names):
            if num_kept < self.keep_last:
                num_kept += self._is_sound(name)
            else:
                self._sound.discard(name)
                with contextlib.suppress(FileNotFoundError):  # another process deleted it
                    leave(self.store, name)

    def _remove_unused_bases(self, listing: Listing) -> None:
        used = frozenset() if self._increments is None else self._increments.bases
        if any(base not in used for base in bases_in(listing.files)):
            self.check()
            own = () if self._increments is None else self._increments.own
            remove_unused(self.store, besides=used, own=own)

    def _is_sound(self, name: str) -> bool:
        # Each was verified when it was written. Those of earlier processes may have gone bad or been cut since.
        if name not in self._sound:
            try:
                verify_autosave(self.store.path(name))
            except DamagedCheckpointError as damage:
                with contextlib.suppress(FileNotFoundError):  # another process deleted it
                    _logger.warning("%s It was set aside as %s.", damage, self._set_damaged_aside(name))
                return False
            self._sound.add(name)
        return True

    def _refuse_to_start_over(self, damages: list[DamagedCheckpointError]) -> None:
        damaged = self._autosaves(self.store, self.store.listing(), damaged=True)
        if damaged:
            names = "\n".join(f"  {self.store.path(name)}" for name in damaged)
            raise NoValidCheckpointError(
                f"Autosaves exist in {self.store.url}, but none of them verifies:\n"
                f"{names}\n"
                "A start from scratch would silently discard the work of this run. Put a good copy back under its "
                "name without '.damaged', or start once with FaultTolerance(auto_resume=False), from a checkpoint of "
                "your own or from scratch: these files are then set aside."
            ) from (damages[-1] if damages else None)

    def _set_damaged_aside(self, name: str) -> str:
        autosave_files.rename(self.store, name, f"{name}.damaged")
        return self.store.path(f"{name}.damaged")

    def _autosaves(self, store: Store, listing: Listing, *, damaged: bool = False) -> list[str]:
        folders = [name for name in listing.folders if AUTOSAVE_NAME.fullmatch(name)]
        is_there = self._is_committed if is_url(store.url) else _is_not_empty
        names = [*listing.files, *(name for name in folders if is_there(store, name))]
        found = ((name, AUTOSAVE_NAME.fullmatch(name)) for name in names)
        return sorted((name for name, match in found if match and bool(match["damaged"]) == damaged), key=sequence_of)

    def _in_order_of_leaving(self, store: Store, listing: Listing) -> list[str]:
        # If interrupted, it must leave the newest in place, and never only damaged ones: the next start would refuse.
        return self._autosaves(store, listing, damaged=True) + self._autosaves(store, listing)

    def _is_committed(self, store: Store, name: str) -> bool:
        # Only we delete or move it, and a name is not given twice.
        path = store.path(name)
        if path not in self._committed and autosave_files.is_committed(store, name):
            self._committed.add(path)
        return path in self._committed

    def _superseded(self, listing: Listing) -> list[Store]:
        return [self.store.folder(name) for name in listing.folders if SUPERSEDED_NAME.fullmatch(name) is not None]

    def _all_names(self, listing: Listing) -> list[tuple[Store, str]]:
        listed = [*((folder, folder.listing()) for folder in self._superseded(listing)), (self.store, listing)]
        return [(store, name) for store, found in listed for name in self._in_order_of_leaving(store, found)]

    def _remove_leftovers(self, listing: Listing, *, other_hosts: bool = False) -> None:
        if is_url(self.store.url):
            self._remove_uncommitted(self.store, listing)
        names = [*listing.files, *listing.folders]
        # This process's own directories too: those that could not be deleted, and those of failed saves.
        own = {name: target_name(name) or "" for name in listing.folders if is_of_this_process(name)}
        surely_dead = {**dict(leftovers(names, other_hosts=other_hosts)), **own}
        for name, target in (*leftovers(names, other_hosts=True), *own.items()):
            is_ours = AUTOSAVE_NAME.fullmatch(target) or BASE_NAME.fullmatch(target)
            if is_ours and (name in surely_dead or self._is_abandoned(name)):
                _logger.info("Removing %s, left by a killed writer", self.store.path(name))
                with contextlib.suppress(FileNotFoundError):
                    self.store.delete(name)

    def _remove_uncommitted(self, store: Store, listing: Listing) -> None:
        names = [name for name in listing.folders if AUTOSAVE_NAME.fullmatch(name)]
        names = [name for name in names if not self._is_committed(store, name)]
        if names:
            self.check()  # only the holder of the lock writes here, so these are of nobody who still writes
        for name in names:
            _logger.info("Removing %s, which was not completed or not deleted to the end", store.path(name))
            autosave_files.delete_directory(store, name)

    def _is_abandoned(self, name: str) -> bool:
        return not is_url(self.directory) and is_unchanged_for_long(self.store.path(name))


def _name_in_folder(name: str) -> str:
    return name.rpartition("/")[2]


def _is_not_empty(store: Store, name: str) -> bool:
    """Return whether a directory holds anything; else it was not committed here, or another process is deleting it."""
    try:
        return bool(os.listdir(store.path(name)))
    except FileNotFoundError:
        return False


def save_incident(series: AutosaveSeries, checkpoint: dict[str, object], name: str) -> str:
    """Write the checkpoint of an incident, and verify it.

    Args:
        series: The autosaves of the fit.
        checkpoint: A dict that ``torch.save`` can write.
        name: Its name.

    Returns:
        Its path or URL.

    Raises:
        OSError: If it can't be written.
        DamagedCheckpointError: If it doesn't verify. It is deleted then.
        RunInUseError: If another process has taken over the directory; nothing was changed.
    """
    place = f"{INCIDENTS_FOLDER}/{name}"
    path = series.store.path(place)
    if not is_url(path):
        remove_abandoned(Path(local_path(path)).parent)  # what a killed process has left
    with series.store.writer(place) as file:
        save_to_file(checkpoint, file)
        series.check()
        damage = None if is_url(path) else read_back(file)
    if damage is not None:
        series.store.delete(place)
        raise DamagedCheckpointError(f"{path} does not read back as it was written: {damage}") from damage
    return path
