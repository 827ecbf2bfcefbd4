"""Check whether the bytes of a checkpoint are those that were written, and whether its content loads safely.

The two checks are separate. Damage is a reason to take an older file; a refusal to unpickle would hit every file alike.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, cast

import torch

from lightning_faulttolerant.checkpoint import autosave_files
from lightning_faulttolerant.checkpoint.archive import find_damage, has_checksums, is_legacy
from lightning_faulttolerant.checkpoint.checked_file import CheckedFile, RecordContent
from lightning_faulttolerant.checkpoint.contents import verify_directory, verify_directory_if_any
from lightning_faulttolerant.checkpoint.joined_file import JoinedFile, find_whole_damage, opened_whole
from lightning_faulttolerant.checkpoint.manifest import Verification, describe_damage
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from lightning_faulttolerant.storage.local import flushed_meanwhile
from lightning_faulttolerant.storage.store import is_url, local_copy, local_path, open_file

_logger = logging.getLogger(__name__)

_CHECKSUMS_OFF = "all its CRC32 are 0, as torch.save leaves them after torch.serialization.set_crc32_options(False)"
_LEGACY = "it is in torch's format from before 1.6, which has no checksums"

_NOT_THERE = (FileNotFoundError, IsADirectoryError)
# The errors that torch.load raises for cut or garbled content.
_LOAD_ERRORS = (EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, struct.error)

_SAFE_LEAVES = (type(None), bool, float, str)
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
CONTAINERS = (dict, OrderedDict, list, tuple)


def verify_path(path: str | os.PathLike[str]) -> Verification:
    """Read a checkpoint once, file or directory, and compare all that can be compared; nothing is unpickled.

    Args:
        path: A file written by ``torch.save``, a directory with a manifest, or the URL of either.

    Returns:
        Whether it was verified by checksums or was written without them.

    Raises:
        DamagedCheckpointError: If something is missing, truncated or changed, or a directory was never committed.
        OSError: If it can't be read for a reason that is not damage, such as a missing permission.
        CheckpointError: If the package for this kind of URL is not installed.
    """
    if is_url(path):
        return _verify_url(os.fspath(path))
    return verify_directory(path) if os.path.isdir(local_path(path)) else verify_file(path)


def verify_file(path: str | os.PathLike[str]) -> Verification:
    """Read a checkpoint file once and compare all that can be compared; nothing is unpickled.

    If an autosave refers to tensors in a base, these are read and compared, too. The memory needed does not depend on
    the file's size. It is 8 MiB, or about 40 MiB for a URL.

    Args:
        path: A file written by ``torch.save``, or the URL of one.

    Returns:
        Whether it was verified by checksums or was written without them.

    Raises:
        DamagedCheckpointError: If the file is missing, truncated, changed, or not a ``torch.save`` file.
        OSError: If it can't be read for a reason that is not damage, such as a missing permission.
        CheckpointError: If the package for this kind of URL is not installed.
    """
    with damage_named(path), opened_whole(path) as file:
        return verify_open_file(path, file)


def read_back(file: IO[bytes]) -> DamagedCheckpointError | None:
    """Return the damage of a file that was just written, and is not closed yet; ``None`` if it verifies.

    Only its own bytes are compared, not those of a base that it refers to.
    """
    # The read comes from memory, whether or not the disk has the data yet. So the read and the flush can overlap.
    with flushed_meanwhile(file):
        try:
            with damage_named(file.name), open_file(file.name, whole=True) as written:
                verify_open_file(file.name, written)
        except DamagedCheckpointError as damage:
            return damage
    return None


def load_file(
    path: str | os.PathLike[str], *, map_location: object = "cpu", weights_only: bool = True
) -> dict[str, Any]:
    """Verify a checkpoint and load it, by default with ``weights_only=True``.

    A file that was written without checksums is loaded, with one warning that it could not be verified.

    Args:
        path: A file written by ``torch.save``, or the URL of one; the URL is transferred once.
        map_location: As in ``torch.load``.
        weights_only: As in ``torch.load``; if False, a file may run any code.

    Returns:
        The content.

    Raises:
        DamagedCheckpointError: If the file is missing, truncated, changed, or not a ``torch.save`` file.
        UnsafeCheckpointError: If the file holds an object that ``weights_only=True`` refuses.
        CheckpointError: If the content is not a dict, or if a file without checksums does not load. In the second case,
            damage can't be told from a file that was never right.
    """
    with contextlib.ExitStack() as stack:
        # One open file for both steps: the loaded bytes are the verified ones, even if another process puts a new file
        # at the path in between.
        later: list[RecordContent] = []
        with damage_named(path):
            file = stack.enter_context(opened_whole(path, local_copy))
            verification = verify_open_file(path, file, later=None if isinstance(file, JoinedFile) else later)
        checked = CheckedFile(file, later)
        source = cast("IO[bytes]", checked) if later else file
        try:
            loaded = load_open_file(source, verification, map_location=map_location, weights_only=weights_only)
        except Exception:
            _demand_sound(path, checked)  # damage is a reason to take another file, and the error may be a result of it
            raise
        _demand_sound(path, checked)
        return loaded


def _demand_sound(path: str | os.PathLike[str], checked: CheckedFile) -> None:
    with damage_named(path):
        damage = checked.find_damage()
    if damage is not None:
        raise DamagedCheckpointError(describe_damage(path, damage))


def load_path(
    path: str | os.PathLike[str],
    load: Callable[[str | os.PathLike[str]], dict[str, Any]] = load_file,
    *,
    verifies_shards: bool = True,
) -> dict[str, Any]:
    """Verify an autosave and load it; for a directory, verify all of it, and load the part outside the shards.

    Args:
        path: A file written by ``torch.save``, or a directory with a manifest, local or in a store.
        load: Verifies and loads a file.
        verifies_shards: Verify the shards of a directory; not needed if another rank has done so.

    Returns:
        The content; for a directory, without the shards.

    Raises:
        DamagedCheckpointError: As ``load_file``; also if a file of a directory is missing or was changed.
        UnsafeCheckpointError: As ``load_file``.
        CheckpointError: As ``load_file``.
    """
    if is_url(path):
        try:
            return load(path)
        except DamagedCheckpointError as error:
            if not is_no_file(error):
                raise
    elif not os.path.isdir(local_path(path)):
        return load(path)
    directory = local_path(path)
    if verifies_shards:
        autosave_files.verify(directory)
    return load(os.path.join(directory, autosave_files.METADATA_NAME))


def load_written(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load an autosave that was read back just now; the values of tensors in a local file are not read again.

    Args:
        path: As in `load_path`.

    Raises:
        UnsafeCheckpointError: As `load_path`.
    """
    if is_url(path) or os.path.isdir(local_path(path)):
        return load_path(path)
    with opened_whole(path) as file:
        return load_open_file(file, Verification(path=os.fspath(path), has_checksums=True, num_bytes=0), mapped=True)


def verify_autosave(path: str | os.PathLike[str]) -> Verification:
    """Read an autosave once, file or directory, and compare all that can be compared; nothing is unpickled.

    Args:
        path: As in `load_path`.

    Raises:
        DamagedCheckpointError: As ``verify_file``; also if a directory was never committed.
        OSError: As ``verify_file``.
    """
    if is_url(path):
        return _verify_url(os.fspath(path))
    if not os.path.isdir(local_path(path)):
        return verify_file(path)
    return autosave_files.verify(local_path(path))


def unsafe_paths(checkpoint: Mapping[str, object]) -> list[str]:
    """List the places in a nested dict that would not load again with ``weights_only=True``.

    Plain tensors are not written for this check, so the memory needed does not depend on the size of the model.

    Args:
        checkpoint: Dicts, lists and tuples are walked; any other value is tested as a whole.

    Returns:
        The places in the order of the walk, each like ``callbacks/MyCallback/config``.

    Example:
        >>> from pathlib import Path
        >>> unsafe_paths({"epoch": 3, "callbacks": {"Mine": {"folder": Path("/data"), "losses": [0.5]}}})
        ['callbacks/Mine/folder']
    """
    return list(_walk(checkpoint, place="", seen=set()))


def _verify_url(url: str) -> Verification:
    # An object store has no directories. A directory's name can't be opened, or (s3fs) opens as a file without a byte.
    # So a name that is not a checkpoint itself may still have a manifest below it.
    try:
        return verify_file(url)
    except DamagedCheckpointError as error:
        verification = verify_directory_if_any(url) if is_no_file(error) else None
        if verification is None:
            raise
        return verification


def is_no_file(damage: DamagedCheckpointError) -> bool:
    """Return whether there is no file at all. A URL may then be that of a directory with a manifest."""
    cause = damage.__cause__
    return isinstance(cause, OSError) and (cause.errno in (errno.ENOENT, errno.EISDIR) or isinstance(cause, _NOT_THERE))


@contextlib.contextmanager
def damage_named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an ``OSError`` that means damage into a `DamagedCheckpointError`.

    Args:
        path: The file that is read.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EISDIR, errno.EIO) and not isinstance(error, _NOT_THERE):
            raise
        raise DamagedCheckpointError(describe_damage(path, error.strerror or str(error))) from error


def verify_open_file(
    path: str | os.PathLike[str],
    file: IO[bytes],
    *,
    without: str | None = None,
    later: list[RecordContent] | None = None,
) -> Verification:
    """Verify an open checkpoint file, as `verify_file` does.

    Args:
        path: Its path, for messages.
        file: Open for reading, seekable.
        without: The key of a record of tensor values whose content is not read.
        later: Receives the large contents, which are then not read. Not for an autosave that is joined with its base.

    Raises:
        DamagedCheckpointError: As `verify_file`.
        OSError: As `verify_file`.
    """
    num_bytes = file.seek(0, os.SEEK_END)
    if is_legacy(file):
        return Verification(path=os.fspath(path), has_checksums=False, reason=_LEGACY, num_bytes=num_bytes)
    damage = find_whole_damage(file, without=without) if later is None else find_damage(file, later=later)
    if damage is not None:
        raise DamagedCheckpointError(describe_damage(path, damage))
    reason = "" if has_checksums(file) else _CHECKSUMS_OFF
    return Verification(path=os.fspath(path), has_checksums=not reason, reason=reason, num_bytes=num_bytes)


def load_open_file(
    file: IO[bytes],
    verification: Verification,
    *,
    map_location: object = "cpu",
    weights_only: bool = True,
    mapped: bool = False,
) -> dict[str, Any]:
    """Load a file that `verify_open_file` has verified.

    Args:
        file: The file.
        verification: The result.
        map_location: As in ``torch.load``.
        weights_only: As in ``torch.load``.
        mapped: Map the tensors to the file, so that only the used ones are read; where this can't be done, read all.

    Raises:
        UnsafeCheckpointError: As `load_file`.
        CheckpointError: As `load_file`.
    """
    checkpoint = _load(file, verification, map_location=map_location, weights_only=weights_only, mapped=mapped)
    if not verification.has_checksums:
        _warn_unverified(str(verification))
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"{verification.path} holds a {type(checkpoint).__name__}, but a checkpoint is a dict. Is this the right "
            "file?"
        )
    return checkpoint


def _load(
    file: IO[bytes], verification: Verification, *, map_location: Any, weights_only: bool, mapped: bool
) -> object:
    # The verified file, even if another process puts a new one at its path. torch maps only what it opens by a path.
    # An autosave that is joined with its base is no file of the operating system.
    source = f"/proc/self/fd/{file.fileno()}" if mapped and not isinstance(file, JoinedFile) else ""
    is_mapped = os.path.exists(source) and not is_legacy(file)
    try:
        # Some file systems can't map files. If the load fails for another reason, it fails again below.
        with contextlib.suppress(RuntimeError, OSError):
            if is_mapped:
                return torch.load(source, map_location=map_location, weights_only=weights_only, mmap=True)
        file.seek(0)
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        known = "is not damaged" if verification.has_checksums else "can't be verified"
        raise UnsafeCheckpointError(
            f"{verification.path} {known}, but it holds an object that torch.load(weights_only=True) refuses: "
            f"{error}. Loading it may run any code. If you trust the file, allow its classes with "
            "torch.serialization.add_safe_globals, or load it yourself with weights_only=False."
        ) from error
    except _LOAD_ERRORS as error:
        if verification.has_checksums:
            raise
        raise CheckpointError(
            f"{verification}, and does not load: {type(error).__name__}: {error}. We can't tell whether it was "
            "damaged. Use another checkpoint."
        ) from error


@functools.cache
def _warn_unverified(verification: str) -> None:
    _logger.warning("%s. It loads, but we could not verify it.", verification)


def _walk(value: object, *, place: str, seen: set[int]) -> Iterator[str]:
    if is_surely_safe(value):
        return
    if type(value) not in CONTAINERS:
        if not loads_safely(value):
            yield place
        return
    if id(value) in seen:  # shared, or a list that contains itself
        return
    seen.add(id(value))
    for name, child in _children(value):
        yield from _walk(child, place=f"{place}/{name}" if place else name, seen=seen)


def _children(container: Any) -> Iterator[tuple[str, object]]:
    if isinstance(container, dict):
        for key, child in container.items():
            if not isinstance(key, str):
                yield f"key {key!r}", key
            yield str(key), child
    else:
        yield from ((str(index), child) for index, child in enumerate(container))
    # A module's state_dict is an OrderedDict. Its attribute "_metadata" is saved too.
    yield from getattr(container, "__dict__", {}).items()


def is_surely_safe(value: Any) -> bool:
    """Return whether a value surely loads with ``weights_only=True``; False if that has to be tested."""
    kind = type(value)
    if kind in PLAIN_TENSORS:
        return not value.__dict__  # attributes of a tensor are saved with it and have to be tested
    # torch writes b"" and very large integers in a way that it does not read: they have to be tested too.
    return kind in _SAFE_LEAVES or (kind is bytes and value != b"") or (kind is int and value.bit_length() < 64)


def loads_safely(value: object) -> bool:
    """Return whether a value loads again with ``weights_only=True``, by writing and loading it."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - any class may raise anything when it is pickled; each means "does not load"
        return False
    return True
