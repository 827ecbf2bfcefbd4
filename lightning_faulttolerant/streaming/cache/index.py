"""Gets the index of a data set, and the directory that caches its shards."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_faulttolerant.errors import DamagedIndexError, IndexFileError, MissingIndexError
from lightning_faulttolerant.storage.local import atomic_writer
from lightning_faulttolerant.streaming.cache import shard_files
from lightning_faulttolerant.streaming.cache.downloads import Attempts, FailedError, Remote
from lightning_faulttolerant.streaming.cache.locks import locked
from lightning_faulttolerant.streaming.cache.shard_files import LOCK_SUFFIX, OTHER_INDEX, remove_leftovers

_logger = logging.getLogger(__name__)

INDEX_NAME = "index.json"
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedIndex:
    """An index, and the directory of its shards.

    Args:
        text: The content of the index.
        directory: The cache of its shards: ``local``, or a folder in it if ``local`` belongs to another index.
        digest: Distinguishes this index from others.
    """

    text: bytes
    directory: str
    digest: str


def fetch_index(
    *,
    local: str,
    remote: str | None,
    retry: int = 2,
    timeout: float = 60,
    storage_options: Mapping[str, object] | None = None,
) -> FetchedIndex:
    """Return the current index of a data set.

    A copy is kept in the directory. If the directory has another index (the remote one has changed, or two data sets
    share a directory), this index and its shards go to a separate folder, so the two never mix.

    Args:
        local: The directory of the data set on this machine.
        remote: The source of the index. None reads it from ``local``.
        retry: How often a download is tried again.
        timeout: The limit of one attempt, in seconds.
        storage_options: Options of the remote's file system.

    Raises:
        IndexFileError: If the index is missing, or can't be fetched.
        ImportError: If the package for this kind of remote is not installed.
    """
    attempts = Attempts(retry=retry, timeout_seconds=timeout)
    directory = os.path.abspath(local)
    source = Remote(remote, storage_options) if remote is not None else None
    if source is None or source.local_directory() == os.path.realpath(local):
        text = _read(directory)
        return FetchedIndex(text=text, directory=directory, digest=_digest(text))
    text = _download(source, attempts)
    return FetchedIndex(text=text, directory=_directory_for(text, directory, attempts), digest=_digest(text))


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


def _directory_for(text: bytes, directory: str, attempts: Attempts) -> str:
    if _kept(directory) == text:  # without a lock: the directory may not be writable
        return directory
    remove_leftovers(directory)
    path = shard_files.mark_path(directory, INDEX_NAME, LOCK_SUFFIX)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with locked(path, attempts.timeout_seconds):
        kept = _kept(directory)
        if kept is not None and kept != text:
            own = os.path.join(directory, OTHER_INDEX + _digest(text))
            _logger.warning(
                "%s is the cache of another index: the data set has changed, or another data set uses the same "
                "directory. The shards of this one are kept in %s. Remove what you no longer need.",
                directory, own,
            )  # fmt: skip
            directory = own
        if _kept(directory) != text:
            _write(text, directory)
    return directory


def _kept(directory: str) -> bytes | None:
    try:
        text = Path(directory, INDEX_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return text if _is_complete(text) else None  # a power loss may have taken the rest


def _write(text: bytes, directory: str) -> None:
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, INDEX_NAME)
    with atomic_writer(path, fsync=False) as file:
        file.write(text)


def _is_complete(text: bytes) -> bool:
    stripped = text.strip()
    return stripped.startswith(b"{") and stripped.endswith(b"}")


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:_DIGEST_CHARACTERS]
