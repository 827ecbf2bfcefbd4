"""The directory that caches the shards of a data set: its index, and the marks and locks of the processes that use it.

A lock lets only one process of a machine at a time fetch a shard. A process that dies in any way releases its locks. A
lock only saves work. Published files are complete without it, because publishing is one ``os.replace``. Where a file
system can't lock (some network file systems), each process fetches for itself. A forked child, above all a data-loading
worker, holds no locks.

A mark is this machine's record of a shard. A file is trusted unread if it is the same file that was checked: its inode,
size, and times are those of its mark, and the machine has not been restarted since. A restart matters because a file
written shortly before a power loss may have lost its content and nothing else. Otherwise its content is compared with
the checksum of the mark. A mark is written before its file, so a file without a mark was not fetched by this package.

A checksum is not compared with anything when a file has just been fetched, so it may be added to the mark later. Until
then, the file is trusted only by this machine and while it is unchanged, and otherwise it is fetched again.

Files that are being written have temporary names. Those of dead processes are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_faulttolerant.errors import DamagedIndexError, IndexFileError, MissingIndexError
from lightning_faulttolerant.processes import this_boot
from lightning_faulttolerant.records.lines import parse_json
from lightning_faulttolerant.storage.local import (
    atomic_writer,
    is_of_this_process,
    is_unchanged_for_long,
    leftovers,
    target_name,
    temporary_name,
)
from lightning_faulttolerant.storage.lock import FileLock
from lightning_faulttolerant.streaming.cache.downloads import Attempts, FailedError, Remote, pause

_logger = logging.getLogger(__name__)

_FIRST_LOOK_SECONDS = 0.002
_LAST_LOOK_SECONDS = 0.05


def _is_taken(lock: FileLock) -> bool:
    try:
        is_taken = lock.take()
    except PermissionError:
        if os.path.exists(lock.path):
            return False  # another user's
        raise
    if lock.error is not None:
        _logger.debug("A cache directory can't be locked (%s): each process fetches for itself.", lock.error)
    return is_taken


@contextlib.contextmanager
def locked(path: str, timeout_seconds: float) -> Iterator[FileLock | None]:
    """Hold a lock in a block; yield None if it could not be taken in time.

    Args:
        path: The lock's file, in an existing directory.
        timeout_seconds: How long to wait for it; 0 tries once.
    """
    lock = FileLock(path)
    deadline, seconds = time.monotonic() + timeout_seconds, _FIRST_LOOK_SECONDS
    while not _is_taken(lock):
        left = deadline - time.monotonic()
        if left <= 0:
            yield None
            return
        pause(min(seconds, left))
        seconds = min(2 * seconds, _LAST_LOOK_SECONDS)
    try:
        yield lock
    finally:
        lock.release()


def is_abandoned(path: str) -> bool:
    """Return whether a lock's file is the leftover of a dead process. In that case, remove it."""
    with locked(path, 0) as lock:
        return lock is not None


MARKS_DIRECTORY = ".faulttolerant"
"""The folder of marks and locks, in the directory of the cache."""
MARK_SUFFIX = ".mark"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileMark:
    """One file at the time of its check.

    Args:
        algorithm: The algorithm of the checksum.
        checksum: The checksum of the whole file, hexadecimal; empty if it is not known yet.
        identity: Its inode, its size, and the change times of its content and its entry; empty if it may be new.
    """

    algorithm: str
    checksum: str
    identity: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMark:
    """The result of a shard's check.

    Args:
        index: The digest of the index that it belongs to.
        version: What the store said of its files when they were fetched.
        boot: The boot of the machine in which it was checked; empty if unknown.
        is_downloaded: Whether it was fetched, so it may be evicted; False if it was found in the directory.
        files: Its files, in the order of the shard's.
    """

    index: str
    boot: str
    is_downloaded: bool
    files: tuple[FileMark, ...]
    version: str

    def is_unchanged(self, paths: Sequence[str]) -> bool:
        """Return whether the files are those that were checked, without reading them."""
        return (
            bool(self.boot) and self.boot == this_boot() and [file_identity(path) for path in paths] == self._identities
        )

    @property
    def is_sealed(self) -> bool:
        """Whether the checksums of all files are known."""
        return all(file.checksum for file in self.files)

    @property
    def _identities(self) -> list[tuple[int, ...]]:
        return [file.identity for file in self.files]


def mark_path(directory: str, basename: str, suffix: str = MARK_SUFFIX) -> str:
    """Return the path of a shard's mark, or of another file that is kept for it."""
    return os.path.join(directory, MARKS_DIRECTORY, basename + suffix)


def read_mark(path: str) -> ShardMark | None:
    """Return a mark, or None if it is missing. A mark that can't be parsed is returned as one without an index."""
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = parse_json(content)
        files = tuple(FileMark(**{**file, "identity": tuple(file["identity"])}) for file in found.pop("files"))
        return ShardMark(**found, files=files)
    except (ValueError, TypeError, KeyError, AttributeError):  # lost in a power failure, perhaps with its shard
        return ShardMark(index="", boot="", is_downloaded=True, files=(), version="")


def write_mark(path: str, mark: ShardMark) -> None:
    """Write a mark. If nothing can be written, the next process checks the shard again."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_writer(path, fsync=False) as file:
            file.write(json.dumps(asdict(mark)).encode())


def last_use_of(path: str) -> int:
    """Return when a shard was used last (ns), by its mark; -1 if the mark is missing."""
    try:
        return os.stat(path).st_mtime_ns
    except FileNotFoundError:
        return -1


def file_identity(path: str) -> tuple[int, ...]:
    """Return values that change when a file is written, replaced, or renamed. Empty if the file is missing."""
    try:
        found: Any = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextlib.contextmanager
def temporary_for(path: str) -> Iterator[str]:
    """Yield a temporary path next to a path, to be written and then moved to the path. A leftover file is removed.

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


def remove_leftovers(directory: str) -> None:
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


LOCK_SUFFIX = ".lock"
OTHER_INDEX = "index-"
"""The prefix of a folder that holds the shards of another index."""

INDEX_NAME = "index.json"
_ADDRESS_SUFFIX = ".address"


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedIndex:
    """An index, and the directory of its shards.

    Args:
        text: The content of the index.
        directory: The cache of its shards: ``local``, or a folder in it if ``local`` belongs to another index.
        digest: Distinguishes this index at this address from others.
    """

    text: bytes
    directory: str
    digest: str


def fetch_index(directory: str, remote: Remote | None, attempts: Attempts) -> FetchedIndex:
    """Return the current index of a data set.

    A copy is kept in the directory, with its address: without hashes, two data sets may have equal indexes. If the
    directory has another one (the remote one has changed, or two data sets share a directory), this index and its
    shards go to a separate folder, so the two never mix.

    Args:
        directory: The directory of the data set on this machine.
        remote: The source of the index. None reads it from the directory.
        attempts: How a download is tried.

    Raises:
        IndexFileError: If the index is missing, or can't be fetched.
    """
    directory = os.path.abspath(directory)
    if remote is None:
        text = _read(directory)
        return FetchedIndex(text=text, directory=directory, digest=_digest_of_index(text))
    text = _download(remote, attempts)
    address = remote.identity().encode()
    digest = _digest_of_index(text + address)
    return FetchedIndex(text=text, directory=_directory_for(text, address, directory, attempts, digest), digest=digest)


def _read(directory: str) -> bytes:
    path = os.path.join(directory, INDEX_NAME)
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingIndexError(
            f"{path} does not exist. It lists the shards, so nothing can be read. Pass the directory of a data set, "
            "with its split, or remote= to fetch it from."
        ) from error


def _download(source: Remote, attempts: Attempts) -> bytes:
    def attempt() -> bytes:
        text = source.read(INDEX_NAME, timeout_seconds=attempts.timeout_seconds)
        if not _is_complete(text):
            raise DamagedIndexError(f"its {len(text)} bytes are not a complete index")
        return text

    try:
        return attempts.run(attempt)
    except FailedError as failed:
        reason = source.without_secrets(str(failed))
        raise _kind(failed.__cause__)(
            f"The index can't be fetched from {source.address(INDEX_NAME)}: {reason}. It lists the shards, so nothing "
            "can be read. Check remote=, the split, and the connection."
        ) from failed.__cause__


def _kind(cause: BaseException | None) -> type[IndexFileError]:
    if isinstance(cause, FileNotFoundError):
        return MissingIndexError
    return DamagedIndexError if isinstance(cause, DamagedIndexError) else IndexFileError


def _directory_for(text: bytes, address: bytes, directory: str, attempts: Attempts, digest: str) -> str:
    if _is_kept(directory, text, address):  # without a lock: the directory may not be writable
        return directory
    path = mark_path(directory, INDEX_NAME, LOCK_SUFFIX)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for folder in (directory, os.path.dirname(path)):
        remove_leftovers(folder)
    with locked(path, attempts.timeout_seconds):
        if _kept(directory) is not None and not _is_kept(directory, text, address):
            own = os.path.join(directory, OTHER_INDEX + digest)
            _logger.warning(
                "%s is the cache of another index or address: the data set has changed, or another data set uses the "
                "same directory. The shards of this one are kept in %s. Remove what you no longer need.",
                directory, own,
            )  # fmt: skip
            directory = own
        if _kept(directory) is None:
            _write(address, mark_path(directory, INDEX_NAME, _ADDRESS_SUFFIX))
            _write(text, os.path.join(directory, INDEX_NAME))
    return directory


def _is_kept(directory: str, text: bytes, address: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if Path(mark_path(directory, INDEX_NAME, _ADDRESS_SUFFIX)).read_bytes() != address:
            return False
    return _kept(directory) == text  # if it was put there by others, for any address


def _kept(directory: str) -> bytes | None:
    try:
        text = Path(directory, INDEX_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return text if _is_complete(text) else None  # a power loss may have taken the rest


def _write(text: bytes, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with atomic_writer(path, fsync=False) as file:
        file.write(text)


def _is_complete(text: bytes) -> bool:
    stripped = text.strip()
    return stripped.startswith(b"{") and stripped.endswith(b"}")


def _digest_of_index(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
