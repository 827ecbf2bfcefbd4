"""Checks of a shard's files, and checksums that are added to its mark once nothing waits for the shard.

A checksum is not compared with anything when a file has just been fetched, so the first batch needn't wait for it.
Until it is known, a file is trusted only while it is unchanged, by the same boot of the same machine.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_faulttolerant.processes import this_boot
from lightning_faulttolerant.storage.local import is_on_local_disk
from lightning_faulttolerant.streaming.cache.directory import (
    FileMark,
    last_use_of,
    locked,
    read_mark,
    write_mark,
)
from lightning_faulttolerant.streaming.format.index import ShardFile, digest

CRC32 = "crc32"

_BLOCK_BYTES = 1 << 20


def crc32(path: str, *, is_wanted: Callable[[], bool] = lambda: True) -> str:
    """Return the CRC32 of a file: the checksum if no hash of the index is requested.

    Args:
        path: The file.
        is_wanted: Called before each block of 1 MiB. If it returns False, the result is empty.
    """
    checksum = 0
    block = bytearray(_BLOCK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while is_wanted():
            num_bytes = file.readinto(block)
            if not num_bytes:
                return f"{checksum:08x}"
            checksum = zlib.crc32(memoryview(block)[:num_bytes], checksum)
    return ""


def size_fault(path: str, num_bytes: int) -> str | None:
    """Return the fault in a file's size, or None if it is correct."""
    try:
        found = os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return "it does not exist"
    return None if found == num_bytes else f"it has {found} bytes, but the index says {num_bytes}"


def hash_fault(path: str, file: ShardFile, algorithm: str) -> str | None:
    """Return the fault in a file's hash, or None if it is correct."""
    found, expected = _digest(path, algorithm), file.hashes[algorithm]
    return None if found == expected else f"its {algorithm} is {found}, but the index says {expected}"


def mark_fault(path: str, mark: FileMark) -> str | None:
    """Return the difference between a file and its mark, or None if the checksum is that of the mark."""
    if not mark.checksum:
        return "it may have changed, and its checksum is not known"
    found = _digest(path, mark.algorithm)
    return None if found == mark.checksum else f"its {mark.algorithm} is {found}, but was {mark.checksum}"


def _digest(path: str, algorithm: str) -> str:
    if algorithm == CRC32:
        return crc32(path)
    return digest(path, algorithm)


def trusts_unsealed(directory: str) -> bool:
    """Return whether other processes trust a file without a checksum; otherwise each of them would fetch it again.

    Args:
        directory: The directory of the cache. Other machines may share it, unless it is on a local disk.
    """
    return bool(this_boot()) and is_on_local_disk(directory)


def seal(mark_path: str, paths: Sequence[str], lock_path: str, *, is_wanted: Callable[[], bool]) -> bool:
    """Add the missing checksums to a mark, unless its shard was fetched again or evicted since.

    Args:
        mark_path: The path of the mark.
        paths: The files of the shard.
        lock_path: The lock for fetching or evicting the shard.
        is_wanted: Called often meanwhile. If it returns False, the mark stays as it is.

    Returns:
        False if the checksums are not wanted now and still missing.
    """
    with contextlib.suppress(OSError):
        mark = read_mark(mark_path)
        if mark is None or mark.is_sealed:
            return True
        # Without the lock, which would keep others from evicting the shard.
        checksums = [crc32(path, is_wanted=is_wanted) for path in paths]
        if not all(checksums):
            return False
        with locked(lock_path, 0) as lock:
            if lock is None or read_mark(mark_path) != mark or not mark.is_unchanged(paths):
                return True
            last_use = last_use_of(mark_path)
            files = [replace(file, checksum=each) for file, each in zip(mark.files, checksums, strict=True)]
            write_mark(mark_path, replace(mark, files=tuple(files)))
            os.utime(mark_path, ns=(last_use, last_use))  # this was no use
    return True
