"""Autosaves that pruning never removes: their names say so, and the older ones are in their own directory.

A resume does not choose from that directory: it stays when a run has finished, and such a run begins again.
"""

from __future__ import annotations

from lightning_faulttolerant.checkpoint import object_directory
from lightning_faulttolerant.checkpoint.autosave_directory import AUTOSAVE_NAME, KEPT_FOLDER
from lightning_faulttolerant.storage.local import Listing
from lightning_faulttolerant.storage.store import Store


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
        object_directory.rename(store, name, f"{KEPT_FOLDER}/{name}")
    else:
        object_directory.delete(store, name)


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
