"""The files of a cache that are being written, and those that dead processes left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from lightning_faulttolerant.storage.atomic_file import (
    is_of_this_process,
    is_unchanged_for_long,
    leftovers,
    target_name,
    temporary_name,
)


@contextlib.contextmanager
def temporary_for(path: str) -> Iterator[str]:
    """Yield a temporary path beside a path, to be written and then moved to the path. A leftover file is removed.

    Args:
        path: The final path of the file, in an existing directory.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, temporary_name(name))
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def sweep(directory: str) -> None:
    """Remove the files that dead processes were writing in a directory.

    A file that does not change for an hour goes too: its writer is on another host, or its process id came again. If
    the writer lives, it repeats its download, and nothing else can go wrong.

    Args:
        directory: The directory of the cache. Subfolders are not checked.
    """
    with contextlib.suppress(OSError):
        temporary = [name for name in os.listdir(directory) if target_name(name) is not None]
        dead = {name for name, _ in leftovers(temporary)}
        for name in temporary:
            path = os.path.join(directory, name)
            if name in dead or (not is_of_this_process(name) and is_unchanged_for_long(path)):
                with contextlib.suppress(OSError):
                    os.unlink(path)
