"""The shards of one stream on this machine: located, fetched if missing, and checked before use."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar, final

from lightning_faulttolerant.errors import DamagedShardError, MissingShardError, ShardError
from lightning_faulttolerant.storage.lock import ProcessLock
from lightning_faulttolerant.streaming.cache.checksums import hash_fault, size_fault
from lightning_faulttolerant.streaming.cache.directory import is_abandoned, locked, temporary_for
from lightning_faulttolerant.streaming.cache.downloads import Attempts, FailedError, Remote
from lightning_faulttolerant.streaming.cache.shard_files import CacheLimit, KeptShards, publish
from lightning_faulttolerant.streaming.format.codecs import decompress_file
from lightning_faulttolerant.streaming.format.index import ShardFile, ShardInfo, is_known_hash

Opened = TypeVar("Opened")

_log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
# How many times a shard is fetched again if other processes evict it before it can be opened.
_NUM_OPENINGS = 5


@final
class ShardCache:
    """The files of one stream in one directory, which all ranks and workers of a machine share.

    All shared information is in that directory. A process that is killed leaves nothing except temporary files,
    which the next process sweeps. It can be pickled, and used after a fork.

    Args:
        local: The directory. Its existing files are checked before use.
        remote: The source of the shards. With None, nothing is written here except decompressed files.
        shards: The index entries of the shards.
        attempts: How a download is tried.
        keep_zip: Whether a compressed file is kept after decompression. None keeps it if the remote is local.
        validate_hash: The algorithm that checks contents. None checks sizes.
        limit: How much room the files may take.
        index_digest: The digest of the index. Files in the directory that belong to another index are fetched again.

    Raises:
        ValueError: If an argument is invalid, or the index has no hashes of this algorithm.
    """

    def __init__(
        self,
        *,
        local: str,
        remote: Remote | None,
        shards: Sequence[ShardInfo],
        attempts: Attempts,
        keep_zip: bool | None,
        validate_hash: str | None,
        limit: CacheLimit | None,
        index_digest: str,
    ) -> None:
        _check_hashes(shards, validate_hash)
        self.directory = os.path.abspath(local)
        self.shards = shards
        self._attempts, self._remote = attempts, remote
        self._keep_zip = self._remote is None or (self._remote.is_local if keep_zip is None else keep_zip)
        self._validate_hash = validate_hash
        self.kept = KeptShards(
            self.directory,
            shards,
            index_digest=index_digest,
            validate_hash=validate_hash,
            is_marked=self._remote is not None,
            version=self._version,
        )
        self._is_askable = True
        self.limit = limit if self._remote is not None else None
        if self.limit is not None:
            self.limit.add(self)
        self._sound: set[int] = set()
        self._holds: Counter[tuple[int, int]] = Counter()  # by process: a forked child holds no shard of its parent's
        self._holds_lock = ProcessLock()
        self._swept_by = 0

    @property
    def address(self) -> str | None:
        """The address that shards are fetched from, or None."""
        return None if self._remote is None else self._remote.identity()

    @property
    def has_remote(self) -> bool:
        """Whether there is a source to fetch from."""
        return self._remote is not None

    @property
    def gains_from_threads(self) -> bool:
        """Whether several threads fetch faster than one: while they wait for a server, or decompress."""
        if self._remote is None:
            return False
        return bool(self.shards and self.shards[0].compression) or not self._remote.is_on_local_disk()

    def is_here(self, shard: int) -> bool:
        """Return whether a shard can be read without a fetch. It is checked the first time in a process."""
        if shard in self._sound:
            if self.kept.is_there(shard):
                return True
            self._sound.discard(shard)  # evicted
        if self.kept.fault(shard) is not None:
            return False
        self._sound.add(shard)
        return True

    def fetch(self, shard: int, *, is_sealed: bool = True) -> str:
        """Return the directory of a shard, once the shard is there and has been checked.

        Another process may evict it at any time. To read it, use ``open``.

        Args:
            shard: Its number in the index.
            is_sealed: Whether its checksum, with which later processes check it, is computed now. Otherwise the caller
                lets `seal` compute it when nothing waits for the shard.

        Raises:
            MissingShardError: If it is not where the index says.
            DamagedShardError: If its size or its hash differs from the index, after all attempts.
            CacheLimitError: If there is no room for it.
            ShardError: If the fetch failed for another reason.
        """
        if not self.is_here(shard):
            self._get(shard, is_sealed=is_sealed)
            self._sound.add(shard)
        elif self.limit is not None:
            self.kept.touch(shard)
        return self.directory

    def seal(self, shard: int, *, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Compute the checksum of a shard if it was fetched without one.

        Args:
            shard: Its number in the index.
            is_wanted: Called often meanwhile. If it returns False, the shard stays without a checksum.

        Returns:
            False if the checksum is not wanted now and still missing.
        """
        return self._remote is None or self.kept.seal(shard, is_wanted=is_wanted)

    def open(self, shard: int, opener: Callable[[str], Opened]) -> Opened:
        """Return the opener's result for a shard. If the shard is evicted before it is opened, it is fetched again.

        Args:
            shard: Its number in the index.
            opener: Takes the directory. It is called again if it raises FileNotFoundError, and if it finds a fetched
                shard damaged.

        Raises:
            ShardError: In the same cases as ``fetch``.
        """
        was_damaged = False
        for _ in range(_NUM_OPENINGS):
            directory = self.fetch(shard)
            try:
                return opener(directory)
            except FileNotFoundError:
                if self._remote is None:
                    raise
            except DamagedShardError:  # damage that neither size nor hash has shown
                if self._remote is None or was_damaged:
                    raise
                was_damaged = True
                self.kept.remove(shard)
        raise ShardError(
            f"{self._name(shard)} was removed from {self.directory} {_NUM_OPENINGS} times before it could be opened. "
            "Other processes evict shards that this one needs. Pass a larger cache_limit."
        )

    def hold(self, shard: int) -> None:
        """Prevent this process from evicting a shard. Each hold needs its own release."""
        with self._holds_lock:
            self._holds[os.getpid(), shard] += 1

    def release(self, shard: int) -> None:
        """Release a shard that was held."""
        with self._holds_lock:
            self._holds -= Counter([(os.getpid(), shard)])  # never below zero

    def is_held(self, shard: int) -> bool:
        """Return whether this process holds a shard."""
        return self._holds[os.getpid(), shard] > 0

    def num_bytes_of(self, shard: int) -> int:
        """Return the bytes that a shard takes while it is fetched: its files, and the compressed ones."""
        info = self.shards[shard]
        return sum(file.num_bytes for file in (*info.files, *info.zip_files))

    def discard(self, shard: int) -> None:
        """Remove a shard immediately, even if it was used recently; it can be fetched again.

        Raises:
            ValueError: If there is no remote to fetch it from.
        """
        if self._remote is None:
            raise ValueError(
                f"{self._name(shard)} in {self.directory} can't be evicted: without a remote, it can't be fetched "
                "again, and this may be the only copy. Delete its files yourself if you don't need them."
            )
        self._sound.discard(shard)
        with locked(self.kept.lock_path(shard), self._attempts.longest_seconds):
            self.kept.remove(shard)

    def is_being_fetched(self, shard: int) -> bool:
        """Return whether another process is fetching or evicting a shard."""
        return self._remote is not None and not is_abandoned(self.kept.lock_path(shard))

    def _get(self, shard: int, *, is_sealed: bool) -> None:
        if self._remote is None and not self._can_be_decompressed(shard):
            fault = self.kept.fault(shard) or "it has just been removed"
            error = MissingShardError if "it does not exist" in fault else DamagedShardError
            raise error(
                f"{self._name(shard)} can't be read from {self.directory}: {fault}. It can't be fetched, because no "
                "remote is given. Pass remote=, or put the file back."
            )
        try:
            self._prepare()
            # The holder of the lock gives up before that, or it is suspended: then this process fetches the shard, too.
            with locked(self.kept.lock_path(shard), self._attempts.longest_seconds) as lock:
                if self.kept.fault(shard) is None:
                    return
                if self.limit is not None:
                    self.kept.remove(shard)  # the existing files are not a valid copy, but take room
                    self.limit.make_room(self, shard, lock, timeout_seconds=self._attempts.longest_seconds)
                self._attempts.run(functools.partial(self._bring, shard, is_sealed=is_sealed))
        except FailedError as failed:
            raise self._error(shard, failed) from failed.__cause__
        except OSError as error:
            raise ShardError(
                f"{self._name(shard)} can't be written to {self.directory}: {error}. A shard is read from this "
                "directory. Pass a writable local directory with enough space."
            ) from error

    def _version(self, shard: int) -> str | None:
        info = self.shards[shard]
        if self._remote is None or not self._is_askable:
            return None
        seconds = min(self._attempts.timeout_seconds, _ANSWER_SECONDS)
        try:
            return "; ".join(
                self._remote.version(file.basename, timeout_seconds=seconds) for file in info.zip_files or info.files
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 - any client's
            self._is_askable = False
            reason = self._remote.without_secrets(f"{type(error).__name__}: {error}")
            _log.warning(
                "%s does not say which version of a shard it has (%s). Shards in %s are used as they were fetched.",
                self._remote.address(""), reason, self.directory,
            )  # fmt: skip
            return None

    def _prepare(self) -> None:
        if self._swept_by != os.getpid():
            self.kept.prepare()
            self._swept_by = os.getpid()

    def _can_be_decompressed(self, shard: int) -> bool:
        zip_files = self.shards[shard].zip_files
        return bool(zip_files) and all(os.path.exists(self.kept.path(file)) for file in zip_files)

    def _bring(self, shard: int, *, is_sealed: bool) -> None:
        info, version = self.shards[shard], self._version(shard) or ""
        with contextlib.ExitStack() as stack:
            temporaries = []
            for number, file in enumerate(info.files):
                path = self.kept.path(file)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                temporaries.append(stack.enter_context(temporary_for(path)))
                zip_file = info.zip_files[number] if info.zip_files else None
                self._bring_file(shard, file, zip_file, temporaries[-1])
            self.kept.publish(shard, temporaries, version=version, is_sealed=is_sealed)

    def _bring_file(self, shard: int, file: ShardFile, zip_file: ShardFile | None, target: str) -> None:
        if zip_file is None:
            self._download(file, target)
        else:
            self._unpack(shard, file, zip_file, target)
            self._check(target, file)

    def _unpack(self, shard: int, file: ShardFile, zip_file: ShardFile, target: str) -> None:
        algorithm = self.shards[shard].compression or ""
        path = self.kept.path(zip_file)
        if self._remote is None or self._is_kept(shard, zip_file):
            try:
                self._check(path, zip_file)
                decompress_file(path, target, algorithm, num_bytes=file.num_bytes)
            except Exception:
                if self._remote is not None:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)  # the next attempt downloads it
                raise
            return
        with temporary_for(path) as temporary:
            self._download(zip_file, temporary)
            decompress_file(temporary, target, algorithm, num_bytes=file.num_bytes)
            if self._keep_zip:
                publish(temporary, path)

    def _is_kept(self, shard: int, zip_file: ShardFile) -> bool:
        return self.kept.is_current(shard) and size_fault(self.kept.path(zip_file), zip_file.num_bytes) is None

    def _download(self, file: ShardFile, target: str) -> None:
        assert self._remote is not None
        self._remote.download(file.basename, target, timeout_seconds=self._attempts.timeout_seconds)
        self._check(target, file)

    def _check(self, path: str, file: ShardFile) -> None:
        fault = size_fault(path, file.num_bytes)
        if fault is None and self._validate_hash is not None:
            fault = hash_fault(path, file, self._validate_hash)
        if fault is not None:
            raise DamagedShardError(f"{file.basename}: {fault}")

    def _error(self, shard: int, failed: FailedError) -> ShardError:
        cause, info = failed.__cause__, self.shards[shard]
        file = (info.zip_files or info.files)[0]
        address = self._remote.address(file.basename) if self._remote else self.kept.path(file)
        reason = self._remote.without_secrets(str(failed)) if self._remote else str(failed)
        what = f"{self._name(shard)} can't be fetched from {address}: {reason}."
        if isinstance(cause, FileNotFoundError):
            return MissingShardError(
                f"{what} The index names it, so no epoch is complete without it. Put the shard there."
            )
        if isinstance(cause, DamagedShardError):
            return DamagedShardError(f"{what} Its samples would be wrong. Write the shard, or its index, again.")
        return ShardError(f"{what} The epoch can't continue without it. Start again when it can be reached.")

    def _name(self, shard: int) -> str:
        return f"Shard {shard} ({self.shards[shard].files[0].basename})"

    def __getstate__(self) -> dict[str, object]:
        # Shards are checked again in another process, which may be on another machine.
        return {**self.__dict__, "_sound": set(), "_holds": Counter(), "_swept_by": 0}


def _check_hashes(shards: Sequence[ShardInfo], algorithm: str | None) -> None:
    if algorithm is None:
        return
    if not is_known_hash(algorithm):
        raise ValueError(f"validate_hash is {algorithm!r}, which is an unknown hash.")
    for number, info in enumerate(shards):
        for file in (*info.files, *info.zip_files):
            if algorithm not in file.hashes:
                raise ValueError(
                    f"validate_hash is {algorithm!r}, but the index has no such hash for shard {number} "
                    f"({file.basename}); it has {', '.join(file.hashes) or 'none'}. Nothing could be checked. Pass "
                    "one that it has, or None."
                )
