"""Save an object so that its path holds the old content or the new one, never a part of either.

Nothing here draws from the global generators of ``random``, NumPy or torch: it would change the training that saves.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

import torch

from lightning_faulttolerant.checkpoint.atomic_file import atomic_writer


def atomic_torch_save(obj: Any, path: str | os.PathLike[str], *, fsync: bool = True) -> None:
    """Write an object with ``torch.save`` so that a crash at any moment leaves the old file or the new one.

    The object is streamed, not copied, and each record gets the CRC32 that ``verify_file`` checks.

    Args:
        obj: What ``torch.save`` can write.
        path: Where to; the target of a symbolic link is replaced, not the link.
        fsync: Wait until the bytes are on the disk, so that they also survive a power loss.

    Raises:
        OSError: If the file can't be written; the old file is still there.
        ValueError: If the path is a device, a pipe or a socket.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     atomic_torch_save({"step": 3}, f"{directory}/a.ckpt")
        ...     torch.load(f"{directory}/a.ckpt", weights_only=True)
        {'step': 3}
    """
    with atomic_writer(path, fsync=fsync) as file:
        save_to_file(obj, file)


def save_to_file(obj: Any, file: IO[bytes]) -> None:
    """Write an object with ``torch.save``, each record with the CRC32 that ``verify_file`` checks.

    Args:
        obj: What ``torch.save`` can write.
        file: Open for writing.
    """
    with _crc32_forced(), _first_error_shown():
        torch.save(obj, file)


def atomic_write_bytes(data: bytes, path: str | os.PathLike[str], *, fsync: bool = True) -> None:
    """Write a small file so that a crash at any moment leaves the old file or the new one.

    Args:
        data: The whole content.
        path: Where to; the target of a symbolic link is replaced, not the link.
        fsync: Wait until the bytes are on the disk.

    Raises:
        OSError: If the file can't be written; the old file is still there.
        ValueError: If the path is a device, a pipe or a socket.
    """
    with atomic_writer(path, fsync=fsync) as file:
        file.write(data)


@contextlib.contextmanager
def _crc32_forced() -> Iterator[None]:
    # The option came with torch 2.6, is thread-local since 2.12 and global before, and is read when torch.save begins.
    # Before 2.12, saves that overlap in two threads could put it back under one another: only for users who switched
    # it off, and verify_file then says so.
    if not hasattr(torch.serialization, "set_crc32_options"):
        yield
        return
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextlib.contextmanager
def _first_error_shown() -> Iterator[None]:
    # When a write fails, or a signal handler raises during it, torch.save closes its zip, fails at that and raises
    # "RuntimeError: unexpected pos": it would hide "No space left on device", a Ctrl-C and our own TrainingStopped.
    surrounding = sys.exc_info()[1]
    try:
        yield
    except RuntimeError as error:
        first = error.__context__
        if first is None or first is surrounding or "unexpected pos" not in str(error):
            raise
        raise first from None
