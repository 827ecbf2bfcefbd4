"""Save an object atomically: its path holds the old content or the new one, never a part of either.

Nothing here draws from the global generators of ``random``, NumPy or torch: a draw would change the training.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, final

import torch

from lightning_faulttolerant.storage.store import open_writer


def atomic_torch_save(
    obj: object, f: str | bytes | os.PathLike[str] | IO[bytes], *, fsync: bool = True, **torch_save_kwargs: object
) -> None:
    """Save an object like ``torch.save``; a crash at any moment leaves the old file or the new one.

    The object is streamed, not copied. Each record gets the CRC32 that ``verify_file`` checks.

    Args:
        obj: Any object that ``torch.save`` can write.
        f: A path, a URL that fsspec understands, or a binary file that is open for writing. If the path is a symbolic
            link, the link's target is replaced, not the link. At a URL, the object becomes visible when it is complete.
            An open file is written to directly: a crash may lose its old content, and only its owner can close it.
        fsync: Wait until the bytes are on the disk, so that they also survive a power loss. An open file without a
            descriptor, such as a ``BytesIO``, is flushed.
        torch_save_kwargs: Keywords of ``torch.save``: ``pickle_module``, ``pickle_protocol``, and its private ones.

    Raises:
        OSError: If the file can't be written. If `f` is a path, the old file still exists.
        ValueError: If the path is a device, a pipe or a socket, or if torch's old file format is requested.
        TypeError: If `f` is a text file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     atomic_torch_save({"step": 3}, f"{directory}/a.ckpt")
        ...     torch.load(f"{directory}/a.ckpt", weights_only=True)
        {'step': 3}
    """
    if isinstance(f, (str, bytes, os.PathLike)):
        with open_writer(os.fsdecode(f), fsync=fsync) as file:
            save_to_file(obj, file, **torch_save_kwargs)
        return
    save_to_file(obj, f, **torch_save_kwargs)
    if fsync:
        _fsync_open_file(f)


def save_to_file(obj: object, file: IO[bytes], **torch_save_kwargs: Any) -> None:
    """Write an object with ``torch.save``, each record with the CRC32 that ``verify_file`` checks.

    Args:
        obj: Any object that ``torch.save`` can write.
        file: Open for writing.
        torch_save_kwargs: Keywords of ``torch.save``.

    Raises:
        OSError: If a write fails, or the file takes no more bytes.
        ValueError: If torch's old file format is requested.
        TypeError: If it is a text file.
    """
    if not torch_save_kwargs.get("_use_new_zipfile_serialization", True):
        raise ValueError(
            "_use_new_zipfile_serialization=False requests torch's old file format, which has no checksums. Damage "
            "would never be detected. Leave it out, or call torch.save itself."
        )
    if isinstance(file, io.TextIOBase):
        raise TypeError(
            f"{file!r} is a text file, but a checkpoint is bytes. Open it with mode 'wb', or give its path."
        )
    whole: Any = WholeWriter(file) if hasattr(file, "write") else file  # torch refuses an object that is not a file
    with _crc32_forced(), _first_error_shown():
        torch.save(obj, whole, **torch_save_kwargs)


def atomic_write_bytes(data: bytes, path: str | os.PathLike[str], *, fsync: bool = True) -> None:
    """Write a small file atomically; a crash at any moment leaves the old file or the new one.

    Args:
        data: The whole content.
        path: A path or a URL. If it is a symbolic link, the link's target is replaced, not the link.
        fsync: Wait until the bytes are on the disk.

    Raises:
        OSError: If the file can't be written; the old file still exists.
        ValueError: If the path is a device, a pipe or a socket.
    """
    with open_writer(path, fsync=fsync) as file:
        WholeWriter(file).write(data)


@final
class WholeWriter:
    """A file that writes all the bytes it gets, or raises: torch ignores what ``write`` returns.

    Args:
        file: Open for writing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Write all of `data`, and return its length.

        Raises:
            OSError: If the file takes no more bytes.
        """
        view = memoryview(data).cast("B")
        num_done = 0
        while num_done < len(view):
            num_written = self._file.write(view[num_done:])
            if num_written is None and not isinstance(self._file, io.RawIOBase):
                break  # a user's class that returns no count; a raw file returns None if it can't take any bytes
            if not num_written:
                reason = f"The file accepted only {num_done} of {len(view)} bytes"
                raise OSError(errno.EIO, reason, getattr(self._file, "name", None))
            num_done += num_written
        return len(view)

    def flush(self) -> None:
        """Flush the file, if it can be flushed."""
        if hasattr(self._file, "flush"):
            self._file.flush()


def _fsync_open_file(file: IO[bytes]) -> None:
    try:
        descriptor = file.fileno()
    except (AttributeError, OSError):  # not a file of the operating system
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a pipe has nothing to wait for
            raise


@contextlib.contextmanager
def _crc32_forced() -> Iterator[None]:
    # The option came with torch 2.6. It is thread-local since 2.12, and was global before. torch.save reads it when it
    # begins. Before 2.12, overlapping saves in two threads could reset it for one another. This affects only users who
    # switched it off, and verify_file then reports it.
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
    # "RuntimeError: unexpected pos". That would hide "No space left on device", a Ctrl-C and our own TrainingStopped.
    surrounding = sys.exc_info()[1]
    try:
        yield
    except RuntimeError as error:
        first = error.__context__
        if first is None or first is surrounding or "unexpected pos" not in str(error):
            raise
        raise first from None
