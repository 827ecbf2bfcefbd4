"""Tell whether the bytes of a checkpoint are those that were written, and whether its content loads safely.

The two are kept apart: damage is a reason to take an older file, a refusal to unpickle would meet every file alike.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO, Any

import torch

from lightning_faulttolerant.checkpoint.archive import find_damage
from lightning_faulttolerant.checkpoint.store import local_copy
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError

_SAFE_LEAVES = (type(None), bool, float, str)
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_CONTAINERS = (dict, OrderedDict, list, tuple)


def verify_file(path: str | os.PathLike[str]) -> None:
    """Read a checkpoint once and compare all that can be compared; nothing is unpickled.

    The memory needed is 1 MiB, whatever the size of the file.

    Args:
        path: A file written by ``torch.save``.

    Raises:
        DamagedCheckpointError: If the file is missing, truncated or no ``torch.save`` file, or a byte of it changed.
        OSError: If it can't be read for a reason that is not damage, such as a missing permission.
    """
    with _open_verified(path):
        pass


def load_file(path: str | os.PathLike[str], *, map_location: Any = "cpu") -> dict[str, Any]:
    """Verify a checkpoint and load it with ``weights_only=True``.

    Args:
        path: A file written by ``torch.save``.
        map_location: As in ``torch.load``.

    Returns:
        The content.

    Raises:
        DamagedCheckpointError: If the file is missing, truncated or no ``torch.save`` file, or a byte of it changed.
        UnsafeCheckpointError: If the file is sound but holds an object that ``weights_only=True`` refuses.
        CheckpointError: If the content is not a dict.
    """
    with _open_verified(path) as file:
        try:
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"{os.fspath(path)} is not damaged, but it holds an object that torch.load(weights_only=True) refuses: "
                f"{error}. Loading it may run any code. If you trust the file, allow its classes with "
                "torch.serialization.add_safe_globals, or load it yourself with weights_only=False."
            ) from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"{os.fspath(path)} holds a {type(checkpoint).__name__}, a checkpoint is a dict. Is this the right file?"
        )
    return checkpoint


def unsafe_paths(checkpoint: dict[Any, Any]) -> list[str]:
    """Find what in a nested dict would not load again with ``weights_only=True``.

    Plain tensors are not written for this, so that the memory needed does not depend on the size of a model.

    Args:
        checkpoint: Dicts, lists and tuples are walked, all else is tested as it is.

    Returns:
        The places in the order of the walk, each like ``callbacks/MyCallback/config``.

    Example:
        >>> from pathlib import Path
        >>> unsafe_paths({"epoch": 3, "callbacks": {"Mine": {"folder": Path("/data"), "losses": [0.5]}}})
        ['callbacks/Mine/folder']
    """
    return list(_walk(checkpoint, place="", seen=set()))


def _open_verified(path: str | os.PathLike[str]) -> IO[bytes]:
    # One open file for both steps: the bytes that are loaded are the ones that were verified, even if another process
    # puts a new file at the path in between.
    try:
        file: IO[bytes] = local_copy(path)
        try:
            reason = find_damage(file)
            file.seek(0)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EISDIR, errno.EIO):
            raise
        raise DamagedCheckpointError(_describe_damage(path, error.strerror or str(error))) from error
    if reason is not None:
        file.close()
        raise DamagedCheckpointError(_describe_damage(path, reason))
    return file


def _describe_damage(path: str | os.PathLike[str], reason: str) -> str:
    return (
        f"Checkpoint {os.fspath(path)} is damaged: {reason}. "
        "Training on from it could go wrong without a sign. Take another checkpoint."
    )


def _walk(value: Any, *, place: str, seen: set[int]) -> Iterator[str]:
    if _is_surely_safe(value):
        return
    if type(value) not in _CONTAINERS:
        if not _loads_safely(value):
            yield place
        return
    if id(value) in seen:  # shared, or a list that holds itself
        return
    seen.add(id(value))
    for name, child in _children(value):
        yield from _walk(child, place=f"{place}/{name}" if place else name, seen=seen)


def _children(container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, dict):
        for key, child in container.items():
            if not isinstance(key, str):
                yield f"key {key!r}", key
            yield str(key), child
    else:
        yield from ((str(index), child) for index, child in enumerate(container))
    # A module's state_dict is an OrderedDict with an attribute, "_metadata", that is saved too.
    yield from getattr(container, "__dict__", {}).items()


def _is_surely_safe(value: Any) -> bool:
    kind = type(value)
    if kind in _PLAIN_TENSORS:
        return not value.__dict__  # attributes of a tensor are saved with it: they have to be tested
    # torch writes b"" and very large integers in a way that it does not read: they have to be tested too.
    return kind in _SAFE_LEAVES or (kind is bytes and value != b"") or (kind is int and value.bit_length() < 64)


def _loads_safely(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - any class may raise anything when it is pickled; each means "does not load"
        return False
    return True
