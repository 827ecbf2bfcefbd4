"""Our part of an existing checkpoint file, if it has one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import IO, Any

import torch

from lightning_faulttolerant.checkpoint.autosave_directory import METADATA_NAME
from lightning_faulttolerant.checkpoint.joined_file import JoinedFile, opened_whole
from lightning_faulttolerant.checkpoint.schema import MARK, CheckpointPart, part_in
from lightning_faulttolerant.storage.store import is_url, local_copy

_log = logging.getLogger(__name__)


def load(path: str) -> dict[str, Any]:
    """Return the content of a checkpoint, here or remote; a local one is read only as far as it is used.

    For a directory of shards, it is the content outside the shards.
    """
    content: dict[str, object]
    if not is_url(path) and os.path.isdir(path):
        path = os.path.join(path, METADATA_NAME)
    with opened_whole(path, _copy) as file:
        if is_url(path) or isinstance(file, JoinedFile):
            content = torch.load(file, map_location="cpu", weights_only=True)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return content


def _copy(path: str) -> IO[bytes]:
    try:
        return local_copy(path)
    except (FileNotFoundError, IsADirectoryError):
        if not is_url(path):
            raise
        return local_copy(f"{path.rstrip('/')}/{METADATA_NAME}")


def part_of(path: str | None) -> CheckpointPart | None:
    """Return our part of a checkpoint, or ``None`` if it has none or can't be read."""
    if path is None:
        return None
    try:
        return part_in(load(path), path)
    except Exception as error:  # noqa: BLE001 - torch.load raises a different error for each kind of damage
        _log.debug("%s can't be read: %s", path, error)
        return None


def are_of_one_run(part: Mapping[str, object] | None, other: Mapping[str, object] | None) -> bool:
    """Return whether two checkpoints with these parts were written by processes of one run."""
    return part is not None and other is not None and MARK in part and part[MARK] == other.get(MARK)
