"""Our part of a checkpoint file that is there, if it has one."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger(__name__)

KEY = "lightning_faulttolerant"


def part_of(path: Path | str | None) -> Mapping[str, Any] | None:
    """Return our part of a checkpoint, or ``None`` if there is none or it can't be read."""
    if path is None:
        return None
    try:
        part: Mapping[str, Any] | None = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get(KEY)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, AttributeError) as error:
        _log.debug("%s can't be read: %s", path, error)
        return None
    return part
