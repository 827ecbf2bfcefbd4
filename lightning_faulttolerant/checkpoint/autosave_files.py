"""The files of a series of autosaves: their names, those of several files, those that are kept, and the shared bases.

The names of the autosaves in a series sort in the order of saving.

An autosave of several files is a directory that other code writes into, and that its manifest commits, which is written
last. On a disk it has a temporary name until then, by which a later process recognizes it as a leftover. An object
store can't rename a directory, so its files have their final names at once. Until the commit, the manifest names their
writer. It also reserves the name: another process can't begin a directory that exists.

Files and directories alike are deleted and moved here. Whatever is interrupted, a directory in a store counts only
while all of its files are there: its manifest is the first to be deleted, and the last to be copied.

Pruning never removes an autosave that is kept. Its name says so, and the older ones are in their own directory. A
resume does not choose from that directory: it stays when a run has finished, and such a run begins again.

Bases are files with the tensors that autosaves share. The name of an autosave has the key of the one that it refers to.
So the names in a directory show which are used, even if an autosave is damaged.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from lightning_faulttolerant.checkpoint.contents import commit_files, verify_directory_if_any
from lightning_faulttolerant.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Verification,
    describe_damage,
    encoded,
    read_manifest,
    this_process,
)
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.records.incidents import INCIDENTS_FOLDER, step_of_incident
from lightning_faulttolerant.storage.local import Listing, fsync_directory, make_directory, target_name, temporary_name
from lightning_faulttolerant.storage.store import Store, create_file, is_url

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


def begin_directory(path: str | os.PathLike[str]) -> str:
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


def commit_directory(
    temporary: str | os.PathLike[str], path: str | os.PathLike[str], files: dict[str, FileEntry]
) -> None:
    """Turn a directory from `begin` into an autosave, once all its files are written and closed.

    Args:
        temporary: The path that `begin` returned.
        path: The path that `begin` was called with.
        files: The entries that ``sum_files`` returned for the files in it.

    Raises:
        OSError: If the manifest or the name can't be written; there is no autosave then.
    """
    commit_files(temporary, files)
    os.rename(temporary, path)
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


def begin_in_store(store: Store, name: str) -> None:
    """Reserve the name of a directory.

    Args:
        store: The directory of the series.
        name: The name of the autosave.

    Raises:
        FileExistsError: If another process has reserved it.
        OSError: If the manifest can't be written.
    """
    create_file(store.folder(name).path(MANIFEST_NAME), encoded(Manifest(owner=this_process())))


def commit_in_store(store: Store, name: str, files: dict[str, FileEntry]) -> None:
    """Turn a directory into an autosave, once all its files are there.

    Args:
        store: The directory of the series.
        name: The name that `begin` was called with.
        files: The sizes and checksums of its files.

    Raises:
        OSError: If the manifest can't be written; there is no autosave then.
    """
    with store.folder(name).writer(MANIFEST_NAME) as file:
        file.write(encoded(Manifest(files=files)))


def is_committed(store: Store, name: str) -> bool:
    """Return whether a directory is an autosave: complete, or damaged later.

    Args:
        store: The directory of the series.
        name: The name of the directory.

    Raises:
        OSError: If the manifest can't be read.
    """
    try:
        return read_manifest(store.path(name)).is_committed
    except FileNotFoundError:
        return False
    except DamagedCheckpointError:
        return True


def delete(store: Store, name: str) -> None:
    """Delete an autosave, or a directory that did not become one.

    Args:
        store: The directory of the series.
        name: A file or a directory, local or in an object store.

    Raises:
        FileNotFoundError: If it does not exist, and the store can tell.
    """
    if _files_in(store, name):
        delete_directory(store, name)
    else:
        store.delete(name)


def delete_directory(store: Store, name: str) -> None:
    """Delete what is left of a directory in an object store.

    Args:
        store: The directory of the series.
        name: The name of the directory; it may be empty or gone.

    Raises:
        OSError: If a file can't be deleted.
    """
    folder = store.folder(name)
    for inner in _files_in(store, name):
        with contextlib.suppress(FileNotFoundError):  # deleted by another process
            folder.delete(inner)
    folder.remove_if_empty()


def rename(store: Store, name: str, new_name: str) -> None:
    """Move an autosave within its store.

    Args:
        store: The directory of the series.
        name: A file or a directory, local or in an object store.
        new_name: The new name.

    Raises:
        OSError: If it can't be moved; it still has its old name then.
    """
    names = _files_in(store, name)
    if not names:
        store.rename(name, new_name)
        return
    for inner in reversed(names):  # the manifest last
        store.copy(f"{name}/{inner}", f"{new_name}/{inner}")
    delete_directory(store, name)


def _files_in(store: Store, name: str) -> list[str]:
    """Return the files of a directory in an object store, its manifest first; none for anything else."""
    if not is_url(store.url):
        return []
    return sorted(store.folder(name).tree(), key=lambda inner: (inner != MANIFEST_NAME, inner))


def is_kept(name: str) -> bool:
    """Return whether an autosave with this name is never removed.

    Args:
        name: The name of the file or directory.

    Example:
        >>> is_kept("autosave-00000003-epoch=0-batch=20-kept.ckpt"), is_kept("autosave-00000004-epoch=0-batch=25.ckpt")
        (True, False)
    """
    match = AUTOSAVE_NAME.fullmatch(name)
    return match is not None and match["kept"] is not None and match["damaged"] is None


def leave(store: Store, name: str) -> None:
    """Remove an autosave from its series: delete it, or move it to the kept ones.

    Args:
        store: The directory of the series.
        name: The name of the autosave.

    Raises:
        FileNotFoundError: If another process has deleted it.
    """
    if is_kept(name):
        rename(store, name, f"{KEPT_FOLDER}/{name}")
    else:
        delete(store, name)


def kept_names(store: Store, listing: Listing | None = None) -> list[str]:
    """Return the names of the kept autosaves that have left a series, oldest first.

    Args:
        store: The directory of the series.
        listing: What is in it, if that is known.
    """
    if listing is not None and KEPT_FOLDER not in listing.folders:
        return []
    return [name for name in store.folder(KEPT_FOLDER).names() if is_kept(name)]


def kept_paths(store: Store) -> list[str]:
    """Return the paths of the kept autosaves that have left a series, oldest first.

    Args:
        store: The directory of the series.
    """
    return [store.path(f"{KEPT_FOLDER}/{name}") for name in kept_names(store)]


BASE_NAME = re.compile(r"base-[0-9a-f]{8}\.tensors")
"""The name of a file with tensors that autosaves refer to, next to them or in the directory above."""

_SETTLED_AFTER_SECONDS = 60.0
"""A younger base may be that of another process, which has not written its autosave yet."""


def new_key() -> str:
    """Return a key for a base. It draws from no generator of the run."""
    return secrets.token_hex(4)


def base_name(key: str) -> str:
    """Return the name of the base with a key."""
    return f"base-{key}.tensors"


def bases_in(names: Collection[str]) -> list[str]:
    """Return the names that are those of bases."""
    return [name for name in names if BASE_NAME.fullmatch(name) is not None]


def unused_bases(store: Store, *, without: Collection[str] = ()) -> list[str]:
    """Return the names of the bases that no autosave refers to: none in the directory, and none in those below it.

    Args:
        store: The directory of a series.
        without: The paths of autosaves in it that don't count, relative to it.
    """
    bases = bases_in(store.listing().files)
    if not bases:
        return []
    names = {path.rpartition("/")[2] for path in store.tree() if path not in without}
    found = (AUTOSAVE_NAME.fullmatch(name) for name in names)
    used = {base_name(match["base"]) for match in found if match is not None and match["base"] is not None}
    return [name for name in bases if name not in used]


def remove_unused(store: Store, *, besides: Collection[str] = (), own: Collection[str] | None = None) -> None:
    """Delete the bases that no autosave refers to. Call this with the lock, after autosaves were deleted or moved.

    Args:
        store: The directory of a series.
        besides: The names of bases that stay.
        own: The names of bases that this process has written. All others stay for a minute, in case another process
            has just written them. Default: none stays.

    Raises:
        OSError: If one can't be deleted.
    """
    unused = [name for name in unused_bases(store) if name not in besides]
    if own is not None:
        unused = [name for name in unused if name in own or _is_settled(store, name)]
    if unused and not is_url(store.url):
        fsync_directory(Path(store.url))  # a power loss must not bring back an autosave without its base
    for name in unused:
        with contextlib.suppress(FileNotFoundError):
            store.delete(name)


def _is_settled(store: Store, name: str) -> bool:
    if is_url(store.url):
        return True
    try:
        return time.time() - os.stat(store.path(name)).st_mtime > _SETTLED_AFTER_SECONDS
    except FileNotFoundError:
        return False


def incident_paths(store: Store) -> list[str]:
    """Return the paths of the checkpoints of a fit's incidents, in the order of their steps.

    Args:
        store: The directory of the fit.
    """
    names = [name for name in store.folder(INCIDENTS_FOLDER).names() if step_of_incident(name) is not None]
    return [store.path(f"{INCIDENTS_FOLDER}/{name}") for name in sorted(names, key=lambda name: (len(name), name))]
