"""Whether the files of a run that a fit resumes from are its own, to go on in, or another run's, to be left alone."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant.trainer.autosave import KEY
from lightning_faulttolerant.trainer.choice import Choice
from lightning_faulttolerant.trainer.files.run_files import RunFiles
from lightning_faulttolerant.trainer.position import FINISHED
from lightning_faulttolerant.trainer.run import Run

_log = logging.getLogger(__name__)


def go_on_in_files(files: RunFiles, run: Run, choice: Choice) -> None:
    """Let the files of the run that `choice` is of be gone on in; to be called before loggers begin theirs.

    An autosave is always of the run itself. Another checkpoint is taken for one of it only where autosaves say that it
    was killed: who begins anew from a file of a run that came to its end must not lose what that has logged behind it.
    """
    part = choice.part
    if part is None and choice.autosave is not None and not _is_finished(_part_of(choice.autosave)):
        part = _part_of(choice.path)
    written = _written(part)
    if part is None or written is None or part.get("inexact"):
        return
    # A fit that came to its end must not take from a later one what that has logged to the same files.
    later = run.later_autosaves() if _is_finished(part) else []
    files.resume_loggers(written, later=[_written(_part_of(path)) for path in later])
    files.goes_on = True


def _is_finished(part: Mapping[str, Any] | None) -> bool:
    return part is not None and part["position"]["where"] == FINISHED


def _part_of(path: Path | str | None) -> Mapping[str, Any] | None:
    """Return our part of a checkpoint, or ``None`` if there is none or it can't be read."""
    if path is None:
        return None
    try:
        part: Mapping[str, Any] | None = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get(KEY)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, AttributeError) as error:
        _log.debug("%s can't be read: %s", path, error)
        return None
    return part


def _written(part: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what a checkpoint says of files beside it; nothing where it was saved before the first batch."""
    return part["ranks"][0].get("files") if part is not None else None
