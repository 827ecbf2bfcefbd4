"""The directories of one series on the disk: which are committed, which is the newest, which may be deleted.

The truth is the newest directory whose manifest verifies. The link and the file beside it are hints. Only two kinds are
deleted: directories begun here and never committed, and old ones once a newer one is committed.

The state of one directory of a series, and whether a process is still writing it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import final

from lightning_faulttolerant.checkpoint.contents import verify_directory, walk
from lightning_faulttolerant.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    save_manifest,
    this_process,
)
from lightning_faulttolerant.checkpoint.saving import atomic_write_bytes
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, NoValidCheckpointError
from lightning_faulttolerant.processes import is_alive, this_machine
from lightning_faulttolerant.storage.local import (
    find_leftovers,
    fsync_directory,
    is_unchanged_for_long,
    make_directory,
    temporary_name,
)

# The directories that this process began and did not end, by path. A series that is gone after an error writes no more.
being_written: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()


class State(Enum):
    """The state of a directory, by its manifest."""

    COMMITTED = "committed"  # its manifest says so; it need not verify
    BEGUN = "begun"
    EMPTY = "empty"  # no manifest, no file
    FOREIGN = "foreign"  # files, and no manifest: written by other software, or by cycling_utils


def state_of(path: Path) -> State:
    """Return the state of a directory; a missing one is empty.

    Args:
        path: The directory.

    Raises:
        OSError: If it can't be checked.
    """
    try:
        return State.COMMITTED if read_manifest(path).is_committed else State.BEGUN
    except CheckpointError:
        return State.COMMITTED  # damaged, or of a newer version: verifying reports it
    except (FileNotFoundError, NotADirectoryError):
        return State.FOREIGN if _has_files(path) else State.EMPTY
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return State.COMMITTED


def _has_files(path: Path) -> bool:
    try:
        return any(names for _, _, names in walk(path))
    except FileNotFoundError:  # its writer is deleting it
        return False


def has_all_files(path: Path) -> bool:
    """Return whether the files that a manifest names exist with the right sizes, without reading them.

    Args:
        path: The directory.
    """
    try:
        verify_directory(path, contents=False)
    except CheckpointError:
        return False
    return True


def is_abandoned(path: Path) -> bool:
    """Return whether the writer of an uncommitted directory is gone.

    Args:
        path: A directory that was begun.
    """
    try:
        owner = read_manifest(path).owner or {}
    except FileNotFoundError:  # its writer is at work, or another process is deleting it
        return False
    if owner.get("hostname") != socket.gethostname() or owner.get("machine", "") != this_machine():
        return is_unchanged_for_long(path)
    process_id = owner.get("process_id")
    if process_id == os.getpid():  # or an earlier process with the same id, as in containers
        return str(path) not in being_written
    return not (isinstance(process_id, int) and is_alive(process_id))


_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesDirectory:
    """A directory with a name of the series.

    Args:
        path: The directory.
        number: The number in its name.
        is_forced: Whether it is kept forever.
    """

    path: Path
    number: int
    is_forced: bool


@final
class DirectorySeries:
    """The directories with one name prefix, seen by the one process that writes them or chooses among them.

    Args:
        output_directory: Absolute; created if it is missing.
        name: The prefix of the directories' names.
        verify: Whether contents are read before a directory is trusted; otherwise only presence and sizes are compared.
        fsync: Whether to wait for the disk.
    """

    def __init__(self, output_directory: Path, *, name: str, verify: bool = True, fsync: bool = True) -> None:
        self.output_directory = output_directory
        self.link = output_directory / f"{name}.latest_checkpoint"
        self.pointer = output_directory / f"{name}.latest_checkpoint.txt"
        self._name = name
        self._verify = verify
        self._fsync = fsync
        begin = rf"{re.escape(name)}_checkpoint_(?P<number>[0-9]+)(?P<forced>_force)?"
        self._current_name = re.compile(begin)
        self._any_name = re.compile(rf"{begin}(\.(damaged|uncommitted)(-[0-9]+)?)?")
        self._told: set[Path] = set()
        self._known: dict[Path, tuple[tuple[int, int, int], State]] = {}

    def suffix(self, name: str) -> str | None:
        """Return the number in a directory's name, with ``_force`` if it has that; None for other names."""
        match = self._current_name.fullmatch(name)
        return None if match is None else match["number"] + (match["forced"] or "")

    def begin(self, *, forced: bool) -> Path:
        """Create the next directory, marked as not committed.

        Args:
            forced: Keep it forever.
        """
        make_directory(self.output_directory)
        states = list(self._states())
        limit = self._foreign_limit(states)
        self._remove_leftovers(states, limit)
        self._set_unfinished_aside(states, limit)
        numbers = [int(match["number"]) for match in self._matches(self._any_name)]
        number = 1 + max([*numbers, limit])
        path = self.output_directory / f"{self._name}_checkpoint_{number}{'_force' if forced else ''}"
        # Under its final name it has a manifest from the first moment: a directory without one is never ours.
        temporary = self.output_directory / temporary_name(path.name)
        try:
            temporary.mkdir()
            save_manifest(temporary, Manifest(owner=this_process()), fsync=self._fsync)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to raise
                self._delete(temporary)
            raise
        self._sync()
        being_written[str(path)] = self
        return path

    def is_begun(self, path: Path) -> bool:
        """Return whether a directory may be committed: it was begun, here or visibly to this process, and not ended."""
        return path.is_dir() and (state_of(path) is State.BEGUN or str(path) in being_written)

    def finish(self, path: Path, *, keep_last: int) -> None:
        """Mark a directory that was just committed as the latest one, and delete the ones beyond ``keep_last``.

        Args:
            path: Committed.
            keep_last: How many committed ones to keep; all if it is below 1.
        """
        being_written.pop(str(path), None)
        self._point_to(path)
        if keep_last > 0:
            self._prune(keep_last)

    def drop(self, path: Path) -> None:
        """Delete a directory that is not committed.

        Args:
            path: The directory; it may already be gone.
        """
        if path.is_dir() and state_of(path) is not State.COMMITTED:
            self._delete(path)
        being_written.pop(str(path), None)

    def committed(self) -> list[SeriesDirectory]:
        """List the directories that were committed, oldest first, without reading them."""
        states = list(self._states())
        limit = self._foreign_limit(states)
        return [
            entry
            for entry, state in states
            if state is State.COMMITTED or (state is State.FOREIGN and entry.number <= limit)
        ]

    def recover(self) -> Path | None:
        """Find the newest directory that verifies, set damaged newer ones aside, and set the link to it.

        Returns:
            The directory, or None if none was ever written.

        Raises:
            NoValidCheckpointError: If there are directories, but none is usable.
            OSError: If something can't be read or written.
        """
        make_directory(self.output_directory)
        limit = self._foreign_limit(list(self._states()))
        newest = self._newest_valid(limit)
        while newest is not None and self._leads_beyond(newest):
            newest = self._newest_valid(limit)
        if newest is not None:
            self._point_to(newest)
            return newest
        damaged = [match.string for match in self._matches(self._any_name) if ".damaged" in match.string]
        foreign = [entry.path.name for entry, state in self._states() if state is State.FOREIGN]
        if damaged:
            raise NoValidCheckpointError(
                f"Checkpoints exist in {self.output_directory}, but none of them verifies: {', '.join(damaged)}. A "
                "start from scratch would silently discard the work of this run. Put a good copy back under its name "
                "without '.damaged', or delete these directories to start from scratch."
            )
        if foreign and limit < 0:
            raise NoValidCheckpointError(
                f"Checkpoints without manifests exist in {self.output_directory} ({', '.join(foreign)}), but the link "
                f"{self.link.name}, which points to the complete one, is gone. Create it again (ln -s <the complete "
                f"directory> {self.link}), or move the directories away to start from scratch."
            )
        if self.link.is_symlink():
            _logger.warning("%s points to %s, and no checkpoint exists.", self.link, os.readlink(self.link))
        return None

    def _newest_valid(self, limit: int) -> Path | None:
        tried: set[Path] = set()
        unverified: Path | None = None
        while True:  # a writer may commit a directory and delete the one that is being checked
            entries = [entry for entry in self.committed() if entry.path not in tried]
            if not entries:
                break
            entry = entries[-1]
            tried.add(entry.path)
            try:
                verification = verify_directory(entry.path, contents=self._verify)
            except DamagedCheckpointError as damage:
                if entry.path.is_dir() and state_of(entry.path) is State.COMMITTED:
                    aside = self._set_aside(entry.path, "damaged")
                    _logger.warning("%s It was set aside as %s.", damage, aside)
                continue
            if verification.has_checksums:
                if unverified is not None:
                    _logger.warning("%s has no manifest, so it can't be verified. Used: %s.", unverified, entry.path)
                return entry.path
            if entry.number <= limit and unverified is None:
                unverified = entry.path
        if unverified is not None:
            self._tell_unverified(unverified)
        return unverified

    def _tell_unverified(self, path: Path) -> None:
        if path not in self._told:
            self._told.add(path)
            _logger.warning("%s has no manifest. It is used unverified, because the link points to it.", path)

    def _foreign_limit(self, states: list[tuple[SeriesDirectory, State]]) -> int:
        # By the rule of cycling_utils, a directory with a number above the link's is incomplete. If the link is lost,
        # our own directories show it: incomplete ones were set aside when the first of ours was begun.
        names = [_pointed_to(self.link), _pointed_to(self.pointer)]
        matches = [self._current_name.fullmatch(name) for name in names if name is not None]
        numbers = [int(match["number"]) for match in matches if match]
        return max([*numbers, *(entry.number for entry, state in states if state is State.COMMITTED)], default=-1)

    def _matches(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        found = (pattern.fullmatch(name) for name in os.listdir(self.output_directory))
        return sorted((match for match in found if match), key=lambda match: (int(match["number"]), match.string))

    def _states(self) -> Iterator[tuple[SeriesDirectory, State]]:
        for match in self._matches(self._current_name):
            path = self.output_directory / match.string
            if path.is_dir() and not path.is_symlink():
                entry = SeriesDirectory(path=path, number=int(match["number"]), is_forced=bool(match["forced"]))
                yield entry, self._state_of(path)

    def _state_of(self, path: Path) -> State:
        # A series of thousands is listed at each save: a manifest that is the same file is not read again.
        try:
            found = os.stat(path / MANIFEST_NAME)
        except OSError:
            return state_of(path)
        mark = found.st_ino, found.st_mtime_ns, found.st_size
        known = self._known.get(path)
        if known is None or known[0] != mark:
            known = self._known[path] = mark, state_of(path)
        return known[1]

    def _remove_leftovers(self, states: list[tuple[SeriesDirectory, State]], limit: int) -> None:
        for entry, state in states:
            if state is State.EMPTY and entry.number <= limit:  # a deletion was interrupted at its last step
                with contextlib.suppress(OSError):
                    entry.path.rmdir()
            elif state is State.BEGUN and is_abandoned(entry.path):
                _logger.info("Removing %s, which its writer never committed", entry.path)
                self._delete(entry.path)
        for path, target in find_leftovers(self.output_directory):
            if path.is_dir() and not path.is_symlink() and self._current_name.fullmatch(target):
                self._delete(path)
            elif target in (self.link.name, self.pointer.name):
                path.unlink(missing_ok=True)

    def _set_unfinished_aside(self, states: list[tuple[SeriesDirectory, State]], limit: int) -> None:
        for entry, state in states:
            if state is State.FOREIGN and entry.number > limit and limit >= 0:
                aside = self._set_aside(entry.path, "uncommitted")
                _logger.warning("%s has no manifest and is newer than the latest. Set aside as %s.", entry.path, aside)

    def _set_aside(self, path: Path, why: str) -> Path:
        aside, number = path.with_name(f"{path.name}.{why}"), 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.{why}-{number}")
        os.rename(path, aside)
        self._sync()
        return aside

    def _prune(self, keep_last: int) -> None:
        whole = [entry for entry, state in self._states() if state is State.COMMITTED and has_all_files(entry.path)]
        if len(whole) < keep_last:
            return
        oldest_kept = whole[-keep_last].number
        for entry in self.committed():
            if entry.number >= oldest_kept or entry.is_forced:
                continue
            if entry in whole or state_of(entry.path) is State.FOREIGN:
                # A half-deleted directory must look like one that was never committed.
                save_manifest(entry.path, Manifest(owner=this_process()), fsync=self._fsync)
                self._delete(entry.path)

    def _delete(self, path: Path) -> None:
        # The manifest goes last: until then it marks the rest as not committed.
        for folder, folders, names in walk(path):
            for name in names:
                if Path(folder, name) != path / MANIFEST_NAME:
                    os.unlink(os.path.join(folder, name))
            for name in folders:
                child = os.path.join(folder, name)
                os.unlink(child) if os.path.islink(child) else os.rmdir(child)
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        path.rmdir()
        self._sync()

    def _leads_beyond(self, path: Path) -> bool:
        # A writer has continued since this directory was found: the link is right, and the directory may be deleted.
        linked = self._current_name.fullmatch(_pointed_to(self.link) or "")
        found = self._current_name.fullmatch(path.name)
        if linked is None or found is None or int(linked["number"]) <= int(found["number"]):
            return False
        return self.link.exists() and state_of(self.output_directory / linked.string) is State.COMMITTED

    def _point_to(self, path: Path) -> None:
        if self.link.is_symlink() and os.path.realpath(self.link) == os.path.realpath(path):
            return
        if self.link.is_dir() and not self.link.is_symlink():
            raise CheckpointError(
                f"{self.link} is a directory, not a link: a copy that follows links created it. The link to the "
                "latest checkpoint can't be created. Move the directory away; the checkpoints have other names."
            )
        atomic_write_bytes(f"{path.name}\n".encode(), self.pointer, fsync=self._fsync)
        temporary = self.output_directory / temporary_name(self.link.name)
        try:
            # Absolute, so that the result of os.readlink() can be opened from any current directory.
            os.symlink(path, temporary, target_is_directory=True)
            os.replace(temporary, self.link)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            _logger.warning("This file system has no links (%s). The latest is in %s.", error, self.pointer)
        self._sync()

    def _sync(self) -> None:
        if self._fsync:
            fsync_directory(self.output_directory)


def _pointed_to(path: Path) -> str | None:
    try:
        text = os.readlink(path) if path.is_symlink() else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return Path(text.strip()).name
