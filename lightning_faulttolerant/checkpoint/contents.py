"""The files of a directory and its manifest: listed and summed at the commit, compared when verified.

Bytes are streamed, and several files are read at once: computing a checksum releases the interpreter lock.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from lightning_faulttolerant.checkpoint.checked_file import sum_of
from lightning_faulttolerant.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Verification,
    describe_damage,
    read_manifest,
    save_manifest,
)
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.storage.local import fsync_directory
from lightning_faulttolerant.storage.store import is_url, local_path, open_file, open_store

_MAX_THREADS = 8
_MAX_SHOWN = 5
_TEMPORARY_MANIFEST = f".{MANIFEST_NAME}.tmp-"
_NO_MANIFEST = f"it has no {MANIFEST_NAME}: this package did not commit it"

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def list_files(directory: str | os.PathLike[str]) -> list[str]:
    """List the files of a local directory and those below it, without the manifest.

    Args:
        directory: The directory to commit.

    Returns:
        Relative paths with ``/`` between the parts, sorted; at least one.

    Raises:
        ValueError: If there is none, or one that can't be part of a checkpoint.
        OSError: If a directory can't be read.
    """
    root = Path(directory)
    names = []
    for path in _walk(root):
        _check_file(root, path)
        names.append(path.relative_to(root).as_posix())
    if not names:
        raise ValueError(
            f"{root} contains no file. An empty checkpoint would count as the latest one, and nothing could be "
            "resumed from it. Write the files before the directory is committed."
        )
    return sorted(names)


def deal_files(directory: str | os.PathLike[str], names: Iterable[str], *, num_shares: int) -> list[list[str]]:
    """Split files into shares with about the same number of bytes.

    Args:
        directory: A local directory.
        names: Relative paths.
        num_shares: At least 1.

    Raises:
        OSError: If a file's size can't be read.
    """
    sizes = {name: os.stat(os.path.join(directory, name)).st_size for name in names}
    shares: list[list[str]] = [[] for _ in range(num_shares)]
    bytes_of = [0] * num_shares
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = bytes_of.index(min(bytes_of))
        shares[least].append(name)
        bytes_of[least] += sizes[name]
    return shares


def sum_files(directory: str | os.PathLike[str], names: Iterable[str], *, fsync: bool = True) -> dict[str, FileEntry]:
    """Compute the sizes and checksums of files in a directory, several at once.

    Args:
        directory: A local directory.
        names: Relative paths.
        fsync: Wait until each file is on the disk before it is read.

    Returns:
        Sizes and checksums, by path.

    Raises:
        OSError: If a file can't be read or flushed to the disk.
        ValueError: If a file changes while it is read.
    """
    root, names = Path(directory), list(names)
    return dict(zip(names, _in_threads(lambda name: _sum_file(root / name, fsync=fsync), names), strict=True))


def commit_files(
    directory: str | os.PathLike[str],
    files: dict[str, FileEntry],
    *,
    metadata: dict[str, Any] | None = None,
    fsync: bool = True,
) -> Manifest:
    """Write the manifest of files whose checksums are known.

    Args:
        directory: A local directory.
        files: Sizes and checksums, by path.
        metadata: Kept in the manifest.
        fsync: Wait until the names of the files, and the manifest, are on the disk.

    Raises:
        OSError: If it can't be written; the directory is then not committed.
    """
    root = Path(directory)
    if fsync:
        folders = {folder for name in files for folder in PurePosixPath(name).parents}  # also folders without a file
        for folder in sorted(folders, reverse=True):
            fsync_directory(root / folder)
    manifest = Manifest(files=files, metadata=metadata or {})
    save_manifest(root, manifest, fsync=fsync)
    if fsync:
        fsync_directory(Path(os.path.abspath(root)).parent)
    return manifest


def verify_directory(directory: str | os.PathLike[str], *, contents: bool = True) -> Verification:
    """Compare a directory with its manifest: each file's presence, size and CRC32.

    A file that the manifest does not name is not damage: no saved byte has changed. It is reported in ``extra_files``.
    At a URL, only the files directly in the directory are checked for this.

    Args:
        directory: A directory, or the URL of one.
        contents: Also read the files; otherwise only their presence and sizes are compared.

    Returns:
        Whether it was verified by checksums. Without a manifest it can't be, and is reported as written without.

    Raises:
        DamagedCheckpointError: If a file or the directory is missing, or was changed; if the manifest was changed; if
            the directory is empty, or was never committed.
        CheckpointError: If a newer version of this package wrote the manifest.
        OSError: If something can't be read for a reason that is not damage, such as a missing permission.
    """
    verification = verify_directory_if_any(directory, contents=contents)
    if verification is not None:
        return verification
    if is_url(directory):
        raise DamagedCheckpointError(describe_damage(directory, _NO_MANIFEST))
    try:
        paths = sorted(_walk(Path(local_path(directory))))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedCheckpointError(describe_damage(directory, str(error.strerror))) from error
    if not paths:
        raise DamagedCheckpointError(describe_damage(directory, "it contains no file"))
    num_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    return Verification(
        path=os.fspath(directory), has_checksums=False, reason=_NO_MANIFEST, num_files=len(paths), num_bytes=num_bytes
    )


def verify_directory_if_any(directory: str | os.PathLike[str], *, contents: bool = True) -> Verification | None:
    """Compare a directory with its manifest, if it has one.

    Args:
        directory: A directory, or the URL of one.
        contents: Also read the files.

    Returns:
        As ``verify_directory``; None if there is no manifest.

    Raises:
        DamagedCheckpointError: As ``verify_directory``.
        CheckpointError: As ``verify_directory``.
        OSError: As ``verify_directory``.
    """
    try:
        manifest = read_manifest(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedCheckpointError(describe_damage(directory, _damage_of(error))) from error
    if not manifest.is_committed:
        reason = f"it was never committed: {describe_owner(manifest)} began it, and died or is still writing"
        raise DamagedCheckpointError(describe_damage(directory, reason))
    reasons = [reason for reason in _in_threads(_comparison(directory, contents), manifest.files.items()) if reason]
    if reasons:
        more = f" and {len(reasons) - _MAX_SHOWN} more" if len(reasons) > _MAX_SHOWN else ""
        shown = "; ".join(reasons[:_MAX_SHOWN]) + more
        raise DamagedCheckpointError(
            describe_damage(directory, f"{len(reasons)} of {len(manifest.files)} files are not as written: {shown}")
        )
    try:
        extra_files = _extra_files(directory, manifest)
    except (FileNotFoundError, NotADirectoryError) as error:  # it was just deleted
        raise DamagedCheckpointError(describe_damage(directory, _damage_of(error))) from error
    return Verification(
        path=os.fspath(directory),
        has_checksums=True,
        num_files=len(manifest.files),
        num_bytes=sum(entry.size_bytes for entry in manifest.files.values()),
        extra_files=tuple(extra_files),
    )


def describe_owner(manifest: Manifest) -> str:
    """Describe the process that is writing a directory, or died while writing it.

    Args:
        manifest: Not committed.
    """
    owner = manifest.owner or {}
    return f"process {owner.get('process_id')} on {owner.get('hostname')}"


def walk(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a directory from the bottom up; one that can't be listed is an error, not an empty one.

    Args:
        path: The directory; links in it are not followed.

    Raises:
        OSError: If a directory can't be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    return os.walk(path, topdown=False, onerror=fail)


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in names + links:
            path = Path(folder, name)
            if path.parent != root or not (name == MANIFEST_NAME or name.startswith(_TEMPORARY_MANIFEST)):
                yield path


def _check_file(root: Path, path: Path) -> None:
    if path.is_symlink() and not _is_inside(root, path):
        raise ValueError(
            f"{path} is a link to {os.path.realpath(path)}, outside the checkpoint. That file could change or vanish, "
            "and damage the checkpoint. Copy the file, or link to one in the same directory."
        )
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "link to a directory" if stat.S_ISDIR(mode) else "device, pipe or socket"
        raise ValueError(f"{path} is a {kind}, which can't be part of a checkpoint. Take it out of the directory.")


def _is_inside(root: Path, path: Path) -> bool:
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(root), ""))


def _sum_file(path: Path, *, fsync: bool) -> FileEntry:
    with open(path, "rb") as file:
        if fsync:
            os.fsync(file.fileno())
        size_bytes, crc32 = sum_of(file, os.fstat(file.fileno()).st_size)
        found_bytes = os.fstat(file.fileno()).st_size
    if found_bytes != size_bytes:
        raise ValueError(
            f"{path} has grown from {size_bytes} to {found_bytes} bytes while the checkpoint was committed. Close all "
            "files, and wait for threads that write, before you commit the directory."
        )
    return FileEntry(size_bytes=size_bytes, crc32=crc32)


def _comparison(directory: str | os.PathLike[str], contents: bool) -> Callable[[tuple[str, FileEntry]], str]:
    store = open_store(directory)
    root = None if is_url(directory) else Path(local_path(directory))

    def compare(item: tuple[str, FileEntry]) -> str:
        name, entry = item
        if root is not None and not _is_inside(root, root / name):
            return f"{name} leads outside the directory"
        try:
            size_bytes, crc32 = store.size(name), entry.crc32
            if contents and size_bytes == entry.size_bytes:
                with open_file(store.path(name), whole=True) as file:
                    size_bytes, crc32 = sum_of(file, size_bytes)
        except OSError as error:
            return f"{name}: {_damage_of(error)}"
        if size_bytes != entry.size_bytes:
            return f"{name} has {size_bytes} bytes, but was written with {entry.size_bytes}"
        return "" if crc32 == entry.crc32 else f"{name} has CRC32 {crc32:08x}, but was written with {entry.crc32:08x}"

    return compare


def _damage_of(error: OSError) -> str:
    """Return the damage that an error stands for; raise the error if it stands for none."""
    kinds = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    if not isinstance(error, kinds) and error.errno not in (errno.EIO, errno.ELOOP):
        raise error
    return error.strerror or str(error) or type(error).__name__


def _extra_files(directory: str | os.PathLike[str], manifest: Manifest) -> list[str]:
    if is_url(directory):
        known = {name.split("/")[0] for name in manifest.files} | {MANIFEST_NAME}
        return [name for name in open_store(directory).names() if name not in known]
    root = Path(local_path(directory))
    return sorted({path.relative_to(root).as_posix() for path in _walk(root)} - set(manifest.files))


def _in_threads(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    with ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="lightning_faulttolerant-sum") as pool:
        return list(pool.map(function, items))
