"""An autosave of several files in an object store: complete as soon as its manifest names them, which is written last.

A store can't rename a directory, so the files have their final names at once. Until the commit, the manifest names
their writer. It also reserves the name: another process can't begin a directory that exists.

Files and directories alike are deleted and moved here. Whatever is interrupted, a directory counts only while all of
its files are there: its manifest is the first to be deleted, and the last to be copied.
"""

from __future__ import annotations

import contextlib

from lightning_faulttolerant.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    encoded,
    read_manifest,
    this_process,
)
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.storage.store import Store, create_file, is_url


def begin(store: Store, name: str) -> None:
    """Reserve the name of a directory.

    Args:
        store: The directory of the series.
        name: The name of the autosave.

    Raises:
        FileExistsError: If another process has reserved it.
        OSError: If the manifest can't be written.
    """
    create_file(store.folder(name).path(MANIFEST_NAME), encoded(Manifest(owner=this_process())))


def commit(store: Store, name: str, files: dict[str, FileEntry]) -> None:
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
