"""The manifest of a directory: names, sizes and CRC32 of its files, in one file that is written last and commits it.

A manifest protects itself with a checksum, and names no file outside its directory.

The result of verifying a checkpoint without finding damage.
"""

from __future__ import annotations

import json
import math
import os
import socket
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from lightning_faulttolerant.processes import this_machine
from lightning_faulttolerant.records.lines import MAX_BYTES, parse_json
from lightning_faulttolerant.storage.local import atomic_writer
from lightning_faulttolerant.storage.store import open_file, open_store


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """A checkpoint in which no damage was found; damage is raised as ``DamagedCheckpointError`` instead.

    Args:
        path: The path, as it was given.
        has_checksums: Whether each byte was compared with a checksum. Otherwise only sizes and layout were checked, as
            far as the format has them.
        reason: Why there are no checksums; empty if there are.
        num_files: 1, or the number of files in the manifest of a directory.
        num_bytes: The size of these files.
        extra_files: Files in a directory that its manifest does not name. They were put there later, and nothing is
            known about them. A ``README`` is not damage.

    Example:
        >>> print(Verification(path="a.ckpt", has_checksums=True, num_bytes=1024))
        a.ckpt: verified by checksums
    """

    path: str
    has_checksums: bool
    reason: str = ""
    num_files: int = 1
    num_bytes: int
    extra_files: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.has_checksums:
            return f"{self.path}: verified by checksums"
        return f"{self.path}: was written without checksums ({self.reason})"


def describe_damage(path: str | os.PathLike[str], reason: str) -> str:
    """Return a message that a checkpoint is damaged, why that matters and what to do.

    Args:
        path: A file or directory.
        reason: The damage, worded to follow a colon.
    """
    return (
        f"Checkpoint {os.fspath(path)} is damaged: {reason}. Training from it could silently go wrong. Use another "
        "checkpoint."
    )


MANIFEST_NAME = "checkpoint_manifest.json"

_FORMAT = "lightning_faulttolerant manifest"
_VERSION = 1
_HEX_DIGITS = frozenset("0123456789abcdef")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """The entry of one file in a manifest.

    Args:
        size_bytes: The file's length.
        crc32: Of the whole content, 0 to 2**32 - 1.
    """

    size_bytes: int
    crc32: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a directory's manifest.

    Args:
        files: The entries by their paths relative to the directory, with ``/`` between the parts.
        metadata: The user's, of plain values.
        owner: The process that is writing the directory; None if it is committed.
    """

    files: dict[str, FileEntry] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    owner: dict[str, Any] | None = None

    @property
    def is_committed(self) -> bool:
        """Whether the directory is complete: all files that it names were on the disk before the manifest was."""
        return self.owner is None


def check_metadata(metadata: dict[str, Any]) -> None:
    """Raise unless metadata reads back from a manifest exactly as it was given.

    Args:
        metadata: Dicts with names, lists, strings, finite numbers, booleans and None.

    Raises:
        TypeError: If it holds anything else; the message names the place.
        ValueError: If a number is not finite.
    """
    if type(metadata) is not dict:
        raise TypeError(f"The metadata of a checkpoint is a {type(metadata).__name__}, but must be a dict.")
    _check_plain(metadata, place="metadata")


def _check_plain(value: object, *, place: str) -> None:
    if type(value) is dict:
        for key, child in value.items():
            if type(key) is not str:
                raise TypeError(f"{place} has the key {key!r}, but keys in a manifest must be strings.")
            _check_plain(child, place=f"{place}/{key}")
    elif type(value) is list:
        for index, child in enumerate(value):
            _check_plain(child, place=f"{place}/{index}")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(
            f"{place} is a {type(value).__name__}, but a manifest can hold only dicts, lists, strings, numbers, "
            "booleans, and None. Convert it, or save it in a file of the checkpoint."
        )
    elif type(value) is float and not math.isfinite(value):
        raise ValueError(f"{place} is {value}, but a manifest can hold only finite numbers.")


def save_manifest(directory: str | os.PathLike[str], manifest: Manifest, *, fsync: bool = True) -> None:
    """Write a manifest into a directory, replacing an existing one.

    Args:
        directory: An existing local directory.
        manifest: The manifest to write.
        fsync: Wait until the manifest and its name are on the disk.

    Raises:
        OSError: If it can't be written; the old one still exists.
    """
    with atomic_writer(Path(directory) / MANIFEST_NAME, fsync=fsync, follows_links=False) as file:
        file.write(encoded(manifest))


def encoded(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file.

    Args:
        manifest: The manifest to write.
    """
    content: dict[str, object] = {"format": _FORMAT, "version": _VERSION}
    if manifest.owner is not None:
        content["owner"] = manifest.owner
    else:
        content["metadata"] = manifest.metadata
        content["files"] = {
            name: {"size_bytes": entry.size_bytes, "crc32": f"{entry.crc32:08x}"}
            for name, entry in manifest.files.items()
        }
    return _encode(content)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a directory and check it; the files are not checked.

    Args:
        directory: A directory, or the URL of one.

    Raises:
        FileNotFoundError: If there is none.
        DamagedCheckpointError: If it is not as it was written, or names a file outside the directory.
        CheckpointError: If a newer version of this package wrote it.
        OSError: If it can't be read.
    """
    with open_file(open_store(directory).path(MANIFEST_NAME)) as file:
        data = file.read(MAX_BYTES + 1)
    try:
        content = parse_json(data)
        whole = type(content) is dict and data == _encode({k: v for k, v in content.items() if k != "checksum"})
    except (ValueError, OverflowError):
        whole = False
    if not whole or content.get("format") != _FORMAT:
        raise DamagedCheckpointError(describe_damage(directory, f"{MANIFEST_NAME} is not as it was written"))
    if content.get("version") != _VERSION:
        raise CheckpointError(
            f"{os.fspath(directory)} has a manifest of version {content.get('version')}, but this "
            f"lightning_faulttolerant knows version {_VERSION}. It can't tell whether the checkpoint is complete. "
            "Install a newer one."
        )
    try:
        return _decode(content)
    except ValueError as error:
        raise DamagedCheckpointError(describe_damage(directory, f"{MANIFEST_NAME} {error}")) from error


def _encode(content: dict[str, object]) -> bytes:
    # Each content has exactly one encoding: comparing the text then also finds changes that parse to the same content.
    body = json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
    checksum = f"{zlib.crc32(body.encode()):08x}"
    return (json.dumps({**content, "checksum": checksum}, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _decode(content: dict[str, object]) -> Manifest:
    owner = content.get("owner")
    if owner is not None:
        if type(owner) is not dict:
            raise ValueError("has an invalid owner")
        return Manifest(owner=owner)
    files, metadata = content.get("files"), content.get("metadata")
    if type(files) is not dict or type(metadata) is not dict:
        raise ValueError("has no list of files")
    return Manifest(
        files={_checked_name(name): _entry(name, value) for name, value in files.items()}, metadata=metadata
    )


def _checked_name(name: str) -> str:
    parts = name.split("/")
    leads_out = os.path.isabs(name) or not {"", ".", ".."}.isdisjoint(parts) or "\0" in name
    if leads_out or name == MANIFEST_NAME:
        raise ValueError(f"names {name!r}, which is not a path of a file in the directory")
    return name


def _entry(name: str, value: object) -> FileEntry:
    size_bytes, crc32 = (value.get("size_bytes"), value.get("crc32")) if type(value) is dict else (None, None)
    if type(size_bytes) is not int or size_bytes < 0:
        raise ValueError(f"has no size of {name!r}")
    if type(crc32) is not str or len(crc32) != 8 or not _HEX_DIGITS.issuperset(crc32):
        raise ValueError(f"has no CRC32 of {name!r}")
    return FileEntry(size_bytes=size_bytes, crc32=int(crc32, 16))


def this_process() -> dict[str, str | int]:
    """Describe this process, as the owner of a directory."""
    return {"hostname": socket.gethostname(), "machine": this_machine(), "process_id": os.getpid()}
