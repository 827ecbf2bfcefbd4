"""An autosave of several files: a directory that other code writes into, and that gets its name when it is complete.

Until then it has a temporary name, by which a later process recognizes it as a leftover. It is committed by its
manifest, which is written last, and then renamed.

The names of the autosaves in a series sort in the order of saving.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_faulttolerant.checkpoint.contents import commit_files, verify_directory_if_any
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, FileEntry, Verification, describe_damage
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.storage.atomic_file import (
    fsync_directory,
    make_directory,
    target_name,
    temporary_name,
)

AUTOSAVE_NAME = re.compile(
    r"autosave-(?P<sequence>\d{8,})-epoch=(?P<epoch>\d+)-batch=(?P<batch>\d+)(?P<kept>-kept)?(?:-base=(?P<base>[0-9a-f]{8}))?"
    r"\.ckpt(?P<damaged>\.damaged)?"
)
"""The name of an autosave, also of one that is kept for good, or was set aside because it is damaged.

``base`` is the key of the file with the tensors that it shares with others, if there is one.
"""

KEPT_FOLDER = "kept"
"""The directory, in that of a fit, of the autosaves that are kept for good and are no longer among the newest."""

SUPERSEDED_NAME = re.compile(r"superseded-(?P<number>\d{4,})-.+")
"""The name of a directory with the autosaves that a run left for another checkpoint."""

_FIT_NAME = re.compile(r"(?:fit|validate|test|predict)-(\d+)")

PREDICTIONS_NAME = re.compile(r"predictions-rank=(?P<rank>\d+)-(?P<number>\d{8,})\.pt")
"""The name of a file with predictions, next to the autosaves of a ``predict``."""

METADATA_NAME = "meta.pt"
"""In an autosave that is a directory of shards, the file with everything outside the shards. Lightning's name."""


def autosave_name(sequence: int, *, epoch: int, batch: int, keep: bool = False, base: str | None = None) -> str:
    """Return the name of an autosave.

    Args:
        sequence: Its number in its series.
        epoch: The epoch that the run is in, from 0.
        batch: The number of finished batches in the epoch.
        keep: Whether it is never removed.
        base: The key of the base that it refers to, if any.

    Example:
        >>> autosave_name(3, epoch=0, batch=20, base="0a1b2c3d")
        'autosave-00000003-epoch=0-batch=20-base=0a1b2c3d.ckpt'
    """
    shared = "" if base is None else f"-base={base}"
    return f"autosave-{sequence:08d}-epoch={epoch}-batch={batch}{'-kept' if keep else ''}{shared}.ckpt"


def sequence_of(name: str) -> int:
    """Return the number of an autosave in its series, or 0 for any other name."""
    match = AUTOSAVE_NAME.fullmatch(name)
    return int(match["sequence"]) if match else 0


def superseded_number(name: str) -> int:
    """Return the number of a directory of superseded autosaves, or 0 for any other name."""
    match = SUPERSEDED_NAME.fullmatch(name)
    return int(match["number"]) if match else 0


def fit_number(name: str) -> int:
    """Return the number of the fit, or evaluation, whose directory has this name, or 0 for any other name."""
    match = _FIT_NAME.fullmatch(name)
    return int(match[1]) if match else 0


def fit_folders(names: Iterable[str]) -> list[str]:
    """Return the directories of a run that hold the autosaves of its fits and evaluations, in their order."""
    return sorted(filter(fit_number, names), key=fit_number)


def begin(path: str | os.PathLike[str]) -> str:
    """Create an empty directory that is to become the autosave `path`.

    Args:
        path: A path that does not exist; missing parents are created.

    Returns:
        Its temporary path, on the same file system.

    Raises:
        OSError: If it can't be created.
    """
    target = Path(os.path.abspath(path))
    make_directory(target.parent)
    temporary = target.parent / temporary_name(target.name)
    temporary.mkdir()
    return str(temporary)


def target_of(temporary: str | os.PathLike[str]) -> str:
    """Return the name of the autosave that a directory is to become.

    Args:
        temporary: The path that `begin` returned.
    """
    name = target_name(os.path.basename(temporary))
    if name is None:
        raise ValueError(f"{os.fspath(temporary)} was not begun as an autosave.")
    return name


def commit(
    temporary: str | os.PathLike[str],
    path: str | os.PathLike[str],
    files: dict[str, FileEntry],
    *,
    metadata: dict[str, Any] | None = None,
    fsync: bool = True,
) -> None:
    """Turn a directory from `begin` into an autosave, once all its files are written and closed.

    Args:
        temporary: The path that `begin` returned.
        path: The path that `begin` was called with.
        files: The entries that ``sum_files`` returned for the files in it.
        metadata: Kept in the manifest: plain values.
        fsync: Wait until all names are on the disk.

    Raises:
        OSError: If the manifest or the name can't be written; there is no autosave then.
    """
    commit_files(temporary, files, metadata=metadata, fsync=fsync)
    os.rename(temporary, path)
    if fsync:
        fsync_directory(Path(path).parent)


def verify(path: str | os.PathLike[str]) -> Verification:
    """Compare each file of an autosave with its manifest; a directory without a manifest was never committed.

    Args:
        path: The directory.

    Raises:
        DamagedCheckpointError: If a file is missing or was changed, or there is no manifest.
        OSError: If something can't be read for a reason that is not damage.
    """
    verification = verify_directory_if_any(path)
    if verification is None:
        raise DamagedCheckpointError(describe_damage(path, f"it has no {MANIFEST_NAME}: it was never committed"))
    return verification
