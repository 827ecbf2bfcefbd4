"""Keep the autosaves of one run: name them, find the newest that verifies, delete the old ones.

Once a first save has returned, there is at each moment an autosave that verified when it was written; a file that this
module did not write is never touched.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from lightning_faulttolerant.checkpoint.atomic import atomic_torch_save
from lightning_faulttolerant.checkpoint.atomic_file import find_leftovers, fsync_directory, make_directory
from lightning_faulttolerant.checkpoint.verify import verify_file
from lightning_faulttolerant.errors import DamagedCheckpointError, NoValidCheckpointError

_logger = logging.getLogger(__name__)

_AUTOSAVE_NAME = re.compile(r"autosave-(?P<sequence>\d{8,})-epoch=\d+-batch=\d+\.ckpt(?P<damaged>\.damaged)?")
_SUPERSEDED_NAME = re.compile(r"superseded-(?P<number>\d{4,})-.+")
_LABEL = re.compile(r"[\w.=+-]+")


@final
@dataclass(frozen=True, slots=True)
class AutosaveSeries:
    """The autosaves in one directory, numbered in the order of saving.

    One process at a time may write (``RunLock``).

    Args:
        directory: Made at the first save.
        keep_last: How many to keep, at least 1. With 2, a file that goes bad on the disk costs one interval.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     series = AutosaveSeries(Path(directory), keep_last=2)
        ...     for batch in range(3):
        ...         _ = series.save({"batch": batch}, epoch=0, batch=batch, global_step=batch)
        ...     [path.name for path in series.paths()]
        ['autosave-00000002-epoch=0-batch=1.ckpt', 'autosave-00000003-epoch=0-batch=2.ckpt']
    """

    directory: Path
    keep_last: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last is {self.keep_last}, it must be at least 1: a resume needs a file.")

    def save(self, checkpoint: dict[str, Any], *, epoch: int, batch: int, global_step: int) -> Path:
        """Write an autosave, verify it by reading it back, and only then delete those that are too many.

        Args:
            checkpoint: What ``torch.save`` can write.
            epoch: The epoch that the run is in, from 0.
            batch: How many batches of the epoch are done.
            global_step: How many optimizer steps are done; for messages.

        Returns:
            The new file.

        Raises:
            OSError: If the file can't be written; the autosaves so far are still there.
            DamagedCheckpointError: If it doesn't verify; it is set aside, the autosaves so far are still there.
        """
        make_directory(self.directory)
        self._remove_leftovers()
        sequence = 1 + max((_sequence(path) for path in self._all_files()), default=0)
        path = self.directory / f"autosave-{sequence:08d}-epoch={epoch}-batch={batch}.ckpt"
        atomic_torch_save(checkpoint, path)
        try:
            verify_file(path)
        except DamagedCheckpointError as error:
            damaged = _set_damaged_aside(path)
            raise DamagedCheckpointError(
                f"The autosave of step {global_step} does not read back as it was written: {error} It is now {damaged}."
                " Earlier autosaves were kept. Check the disk, or save to another one."
            ) from error
        _logger.debug("Saved step %d to %s", global_step, path)
        for old in self.paths()[: -self.keep_last]:
            old.unlink()
        return path

    def newest(self) -> Path | None:
        """Find the newest autosave that verifies; damaged ones that are newer are set aside under another name.

        Returns:
            The file, or None where there has never been one.

        Raises:
            NoValidCheckpointError: If there are autosaves, but all are damaged.
            OSError: If a file can't be read for a reason that is not damage.
        """
        valid, damages = self._first_valid()
        for path, damage in damages.items():
            aside = _set_damaged_aside(path)
            _logger.warning("%s It was set aside as %s. Taken instead: %s.", damage, aside, valid or "none")
        damaged = _autosaves(self.directory, damaged=True)
        if valid is None and damaged:
            names = "\n".join(f"  {path}" for path in damaged)
            raise NoValidCheckpointError(
                f"There are autosaves in {self.directory}, but none of them verifies:\n{names}\n"
                "A start from scratch would throw this run's work away without a word. Put a good copy back under its "
                "name without '.damaged', give a checkpoint of your own, or delete these files to start from scratch."
            ) from (list(damages.values())[-1] if damages else None)
        return valid

    def paths(self) -> list[Path]:
        """List the autosaves that were not set aside.

        Returns:
            The files, oldest first.
        """
        return _autosaves(self.directory)

    def set_aside(self, label: str) -> Path | None:
        """Move all autosaves into a subdirectory, so that the next run starts without them.

        Args:
            label: Why; letters, digits and ``_.=+-``, it becomes a part of the directory's name.

        Returns:
            The subdirectory; None where there is nothing to move.

        Raises:
            OSError: If a file can't be moved.
            ValueError: If the label can't be part of a name.
        """
        if _LABEL.fullmatch(label) is None:
            raise ValueError(f"The label {label!r} can't be part of a name. Use letters, digits and any of _.=+-")
        files = sorted(_autosaves(self.directory) + _autosaves(self.directory, damaged=True), key=_sequence)
        if not files:
            return None
        number = 1 + max((_superseded_number(folder) for folder in self._superseded()), default=0)
        folder = self.directory / f"superseded-{number:04d}-{label}"
        make_directory(folder)
        for path in files:  # oldest first: if this is interrupted, the newest is still where it was
            os.replace(path, folder / path.name)
        fsync_directory(folder)
        fsync_directory(self.directory)
        return folder

    def remove_all(self) -> None:
        """Delete all that this series has written, set aside or left over, then the directory if nothing else is in it.

        Raises:
            OSError: If a file can't be deleted.
        """
        self._remove_leftovers(other_hosts=True)
        for path in list(self._all_files()):
            path.unlink()
        for folder in (*self._superseded(), self.directory):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _first_valid(self) -> tuple[Path | None, dict[Path, DamagedCheckpointError]]:
        damages: dict[Path, DamagedCheckpointError] = {}
        for path in reversed(self.paths()):
            damage = _find_damage(path)
            if damage is None:
                return path, damages
            damages[path] = damage
        return None, damages

    def _superseded(self) -> list[Path]:
        return [
            path
            for path in sorted(self.directory.glob("superseded-*"))
            if _SUPERSEDED_NAME.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()
        ]

    def _all_files(self) -> Iterator[Path]:
        for folder in (self.directory, *self._superseded()):
            yield from _autosaves(folder)
            yield from _autosaves(folder, damaged=True)

    def _remove_leftovers(self, *, other_hosts: bool = False) -> None:
        for path, target in find_leftovers(self.directory, other_hosts=other_hosts):
            if _AUTOSAVE_NAME.fullmatch(target) is not None:
                _logger.info("Removing %s, which a writer that was killed left behind", path)
                path.unlink(missing_ok=True)


def _find_damage(path: Path) -> DamagedCheckpointError | None:
    try:
        verify_file(path)
    except DamagedCheckpointError as damage:
        return damage
    return None


def _autosaves(folder: Path, *, damaged: bool = False) -> list[Path]:
    found = ((path, _AUTOSAVE_NAME.fullmatch(path.name)) for path in folder.glob("autosave-*") if path.is_file())
    return sorted((path for path, match in found if match and bool(match["damaged"]) == damaged), key=_sequence)


def _sequence(path: Path) -> int:
    match = _AUTOSAVE_NAME.fullmatch(path.name)
    return int(match["sequence"]) if match else 0


def _superseded_number(folder: Path) -> int:
    match = _SUPERSEDED_NAME.fullmatch(folder.name)
    return int(match["number"]) if match else 0


def _set_damaged_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged")
    os.replace(path, aside)
    fsync_directory(path.parent)
    return aside
