"""Files of this machine, or of a file system that is mounted on it: written atomically, and the store of a directory.

The path of a file that is written holds the old content or the new one, never a part of either. Nothing here draws from
the global generators of ``random``, NumPy or torch: a draw would change the training.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, final

from lightning_faulttolerant.processes import is_alive

_logger = logging.getLogger(__name__)

_TEMPORARY_NAME = re.compile(
    r"\.(?P<target>.+)\.tmp-(?P<hostname>.*)-(?P<process_id>\d{1,9})-(?P<token>[0-9a-f]{8})[0-9a-f]{8}"
)
# A token, by process id, tells this process from an earlier one with the same id. A fork has its own.
_tokens: dict[int, str] = {}
# The ends of temporary names. Random bytes for each name would let other threads run meanwhile, which may take 5 ms.
_numbers = itertools.count(secrets.randbits(32))

# A file name may have 255 bytes. The temporary name adds up to 64 bytes of the host's name and about 35 of its own.
_MAX_TARGET_NAME_BYTES = 120


ABANDONED_AFTER_SECONDS = 3600.0
"""Whether a writer on another host is alive can't be told. After this time without a change it is taken for dead."""


@contextlib.contextmanager
def atomic_writer(
    path: str | os.PathLike[str], *, fsync: bool = True, follows_links: bool = True
) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces ``path`` when the block ends, and vanishes if the block raises.

    Args:
        path: The target path.
        fsync: Wait until the bytes and the new directory entry are on the disk.
        follows_links: If the path is a symbolic link, replace the link's target; otherwise, replace the link.

    Yields:
        The temporary file, in the directory of the target: a rename across file systems would be a copy.

    Raises:
        OSError: If the file can't be written. The old file still exists, unless the last step failed, the fsync of the
            directory.
        ValueError: If the path is a device, a pipe or a socket.
    """
    target = Path(os.path.realpath(path) if follows_links else os.path.abspath(path))
    _check_replaceable(target)
    temporary = target.parent / temporary_name(target.name)
    is_ours = False
    try:
        with open(temporary, "xb") as file:
            is_ours = True
            yield file
            file.flush()
            if fsync:
                os.fsync(file.fileno())
            written = os.fstat(file.fileno())
        _replace(temporary, target, written)
    except BaseException:
        # The first error is the one to raise, even if the directory is gone by now.
        if is_ours:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise
    if fsync:
        fsync_directory(target.parent)


@contextlib.contextmanager
def flushed_meanwhile(file: IO[bytes]) -> Iterator[None]:
    """Flush the written data to the disk while the block runs, and wait for it at the end.

    Args:
        file: Open for writing.

    Raises:
        OSError: If the disk reports an error.
    """
    file.flush()
    errors: list[BaseException] = []

    def flush() -> None:
        try:
            os.fsync(file.fileno())
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for it
            errors.append(error)

    thread = threading.Thread(target=flush, name="flush")
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if errors:
        raise errors[0]


def _replace(temporary: Path, target: Path, written: os.stat_result) -> None:
    try:
        os.replace(temporary, target)
    except FileNotFoundError:
        # Over NFS the answer to a rename can get lost. The second try then finds that the first one worked.
        if not (target.exists() and os.path.samestat(os.stat(target), written)):
            raise
    # Checked by the temporary name, since another writer may have replaced the target again.
    if os.path.lexists(temporary):
        raise OSError(
            errno.EIO, "The file system reported a rename that it did not do", str(temporary), None, str(target)
        )


def fsync_directory(directory: Path) -> None:
    """Wait until the entries of a directory (new names, renames) are on the disk.

    Args:
        directory: An existing directory.

    Raises:
        OSError: If the disk reports an error. A file system without this operation is not an error.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        _logger.debug("The file system of %s has no fsync for directories: %s", directory, error)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create a directory and its missing parents, and wait until their names are on the disk.

    Args:
        directory: May already exist.

    Raises:
        OSError: If it can't be created.
    """
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_directory(folder.parent)


def remove_directory(directory: Path) -> None:
    """Delete a directory and its content; a kill leaves it whole, or under the name of a temporary file.

    Args:
        directory: An existing directory, not a link.

    Raises:
        FileNotFoundError: If it does not exist.
        OSError: If it can't be deleted.
    """
    temporary = directory
    if target_name(directory.name) is None:
        temporary = directory.parent / temporary_name(directory.name)
        os.rename(directory, temporary)
        fsync_directory(directory.parent)
    shutil.rmtree(temporary)


def find_leftovers(directory: Path, *, other_hosts: bool = False) -> Iterator[tuple[Path, str]]:
    """Find the temporary files that dead writers left in a directory.

    Args:
        directory: Where to look; may be missing.
        other_hosts: As in ``leftovers``.

    Yields:
        The temporary file, and the name of the file that it would have become (cut if very long).
    """
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, target in leftovers(names, other_hosts=other_hosts):
        yield directory / name, target


def leftovers(names: Iterable[str], *, other_hosts: bool = False) -> Iterator[tuple[str, str]]:
    """Find the names of temporary files that dead writers left.

    A temporary file of a process that is alive on this host is never among them. Process ids are those of this
    container: ``RunLock`` must keep apart writers in two containers that share a host name and a directory.

    Args:
        names: The names of all files in a directory.
        other_hosts: Also yield those of other hosts, where it is unknown whether the writer is alive.

    Yields:
        The temporary name, and the name of the file that it would have become (cut if very long).
    """
    for name in names:
        found = _TEMPORARY_NAME.fullmatch(name)
        if found is None:
            continue
        same_host = found["hostname"] == _hostname()
        if _is_dead(int(found["process_id"]), found["token"]) if same_host else other_hosts:
            yield name, found["target"]


def is_unchanged_for_long(path: str | os.PathLike[str]) -> bool:
    """Return whether a file, or a directory and the files in it, is unchanged for ``ABANDONED_AFTER_SECONDS``.

    Args:
        path: May already be gone.
    """
    try:
        within = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in (".", *names)]
        changed = max(os.lstat(found).st_mtime for found in (path, *within))
    except FileNotFoundError:  # its writer is at work
        return False
    return time.time() - changed > ABANDONED_AFTER_SECONDS


def remove_abandoned(directory: Path) -> None:
    """Delete temporary files of killed writers in a directory, once unchanged for ``ABANDONED_AFTER_SECONDS``.

    Args:
        directory: Any directory, which may also hold other files; may be missing.

    Raises:
        OSError: If the directory can't be read.
    """
    for temporary, _ in find_leftovers(directory, other_hosts=True):
        with contextlib.suppress(OSError):  # such as another user's file: the save must not fail for it
            if temporary.is_file() and is_unchanged_for_long(temporary):
                temporary.unlink(missing_ok=True)
                _logger.info("Removed %s, left by a killed writer", temporary)


def is_of_this_process(name: str) -> bool:
    """Return whether this process created a temporary name."""
    found = _TEMPORARY_NAME.fullmatch(name)
    return found is not None and (int(found["process_id"]), found["token"]) == (os.getpid(), _token())


def target_name(name: str) -> str | None:
    """Return the final name of a temporary file, cut if it is very long, or ``None`` for any other file."""
    found = _TEMPORARY_NAME.fullmatch(name)
    return None if found is None else found["target"]


def temporary_name(name: str) -> str:
    """Return a name that no other writer uses, for a file that is renamed to ``name`` later.

    Args:
        name: The later name; cut if it is very long.
    """
    short = os.fsencode(name)[:_MAX_TARGET_NAME_BYTES].decode(errors="ignore")
    return f".{short}.tmp-{_hostname()}-{os.getpid()}-{_token()}{next(_numbers) % 2**32:08x}"


def _token() -> str:
    process_id = os.getpid()
    return _tokens.get(process_id) or _tokens.setdefault(process_id, secrets.token_hex(4))


def _is_dead(process_id: int, token: str) -> bool:
    if process_id == os.getpid():  # in a container each start may have the same id
        return token != _token()
    return not is_alive(process_id)


def _check_replaceable(target: Path) -> None:
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "A file can't replace a directory", str(target))
    if not stat.S_ISREG(mode):
        raise ValueError(
            f"{target} is not a regular file. Writing atomically would replace the device or pipe itself. Pass the "
            "path of a file."
        )


_MOUNTS = Path("/proc/self/mountinfo")
# The file systems of disks and memory. Not FUSE: it may be a mounted bucket.
_LOCAL_TYPES = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "ramfs", "overlay")
)


def is_on_local_disk(directory: str) -> bool:
    """Return whether only this machine can use the files of a directory. False if that is unknown.

    Args:
        directory: An existing directory.
    """
    try:
        # By the id of the mount: btrfs gives files other device numbers than its mount has, and a path does not tell
        # which of several mounts is on top.
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            information = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        finally:
            os.close(descriptor)
        mounts = _MOUNTS.read_text(errors="surrogateescape")
    except OSError:  # not Linux
        return False
    found = re.search(r"^mnt_id:\s*(\d+)$", information, re.MULTILINE)
    return found is not None and type_of_mount(found[1], mounts) in _LOCAL_TYPES


def type_of_mount(mount_id: str, mounts: str) -> str:
    """Return the type of a mounted file system; empty if it is not listed.

    Args:
        mount_id: The mount's id.
        mounts: The content of ``mountinfo``.
    """
    for line in mounts.split("\n"):  # not splitlines: a path may contain other separators
        fields = line.split(" ")
        if fields[0] == mount_id and "-" in fields[6:-1]:  # a hyphen follows the optional fields
            return fields[fields.index("-", 6) + 1]
    return ""


def _hostname() -> str:
    return socket.gethostname().replace("/", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The names of the files and of the folders, sorted. Links to folders and special files are neither."""

    files: list[str]
    folders: list[str]


@final
class LocalStore:
    """The files of one directory, which is created with the first file. See ``Store`` for the methods.

    Args:
        directory: Absolute, or relative to the current directory of the process.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(os.path.abspath(directory))

    @property
    def url(self) -> str:
        """The absolute path."""
        return str(self.directory)

    def path(self, name: str) -> str:
        """Return the absolute path of a file."""
        return str(self.directory / name)

    def names(self) -> list[str]:
        """List the files and folders directly in it."""
        try:
            return sorted(os.listdir(self.directory))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def listing(self) -> Listing:
        """List the files, and the folders that are not links."""
        try:
            with os.scandir(self.directory) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return Listing(files=[], folders=[])
        return Listing(
            files=[entry.name for entry in entries if entry.is_file()],
            folders=[entry.name for entry in entries if entry.is_dir(follow_symlinks=False)],
        )

    @contextlib.contextmanager
    def writer(self, name: str, *, fsync: bool = True) -> Iterator[IO[bytes]]:
        """Open a temporary file that takes the name when the block ends; missing directories are created."""
        path = self.directory / name
        make_directory(path.parent)
        with atomic_writer(path, fsync=fsync, follows_links=False) as file:  # others may have put a link there
            yield file

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return os.stat(self.directory / name).st_size

    def rename(self, name: str, new_name: str) -> None:
        """Move a file, and wait until both names are on the disk."""
        old, new = self.directory / name, self.directory / new_name
        make_directory(new.parent)
        os.replace(old, new)
        # The new name first: the disk may have the file under both names for a moment, but never under none.
        for folder in dict.fromkeys((new.parent, old.parent)):
            fsync_directory(folder)

    def copy(self, name: str, new_name: str) -> None:
        """Copy a file; the copy appears when it is complete."""
        with open(self.directory / name, "rb") as original, self.writer(new_name) as copy:
            shutil.copyfileobj(original, copy)

    def tree(self) -> list[str]:
        """List all files in it and below it, without following links to directories."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # deleted meanwhile, or never there
                raise error

        walked = os.walk(self.directory, onerror=fail)
        found = (os.path.join(folder, name) for folder, _, names in walked for name in names)
        return sorted(Path(path).relative_to(self.directory).as_posix() for path in found)

    def delete(self, name: str) -> None:
        """Delete a file, or a directory and its content."""
        path = self.directory / name
        if path.is_dir() and not path.is_symlink():
            remove_directory(path)
        else:
            os.unlink(path)

    def folder(self, name: str) -> LocalStore:
        """Return a directory within this one."""
        return LocalStore(self.directory / name)

    def remove_if_empty(self) -> None:
        """Remove the directory if it exists and is empty."""
        with contextlib.suppress(FileNotFoundError):
            if not self.directory.is_symlink() and not any(self.directory.iterdir()):
                self.directory.rmdir()

    def abort_uploads(self) -> None:
        """Do nothing: a local writer leaves a named file, see ``leftovers``."""
