"""The files with the tensors that autosaves share: their names, and which of them are still used.

The name of an autosave has the key of the one that it refers to. So the names in a directory show which are used, even
if an autosave is damaged.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Collection
from pathlib import Path

from lightning_faulttolerant.checkpoint.autosave_directory import AUTOSAVE_NAME
from lightning_faulttolerant.storage.atomic_file import fsync_directory
from lightning_faulttolerant.storage.store import Store, is_url

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
