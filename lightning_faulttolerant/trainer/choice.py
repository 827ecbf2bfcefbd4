"""From which checkpoint a fit continues: our newest autosave, the one it was started with, or none."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.advice import worded
from lightning_faulttolerant.checkpoint.autosave_names import METADATA_NAME
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.store import is_url, local_path, open_file
from lightning_faulttolerant.checkpoint.summary import read_summary
from lightning_faulttolerant.checkpoint.verify import verify_path
from lightning_faulttolerant.errors import CheckpointError, NoValidCheckpointError
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.files.parts import KEY, are_of_one_run, load
from lightning_faulttolerant.trainer.options import Options
from lightning_faulttolerant.trainer.position import Position, progress_of
from lightning_faulttolerant.trainer.telling import tell

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What a fit starts from.

    Args:
        path: The checkpoint, or ``None`` for a fresh start.
        origin: The checkpoint that the user named for this fit, if any; autosaves of it are continuations.
        checkpoint: Its content, if it was read already.
    """

    path: str | None
    origin: str | None
    checkpoint: dict[str, Any] | None = None
    sets_aside: str | None = None
    """Autosaves of this run that it leaves, to be set aside once it has begun."""
    is_autosave: bool = False
    """Whether it is one of our own, of which the user has not heard."""
    autosave: str | None = None
    """The newest autosave of this run, where that is not what the fit starts from."""

    @property
    def part(self) -> Mapping[str, Any] | None:
        """Our part of the checkpoint."""
        return (self.checkpoint or {}).get(KEY)

    @property
    def continues(self) -> bool:
        """Whether the fit continues where this run was, rather than beginning again."""
        return self.is_autosave or (self.autosave is not None and self.sets_aside is None)

    def with_checkpoint(self, checkpoint: dict[str, Any] | None) -> Choice:
        """Return the choice with the content that Lightning has read, or without any when it was restored."""
        return replace(self, checkpoint=checkpoint)


def choose(trainer: Trainer, series: AutosaveSeries, given: Any, options: Options) -> Choice:
    """Return what the fit starts from.

    Args:
        trainer: Whose fit it is.
        series: The autosaves of this fit.
        given: The path that Lightning has made of the ``ckpt_path`` of this fit.
        options: Whether to resume at all.
    """
    path = None if given is None else str(given) if is_url(given) else os.path.realpath(local_path(given))
    is_newest = path is not None and compat.is_newest_of_trainer(trainer, path)
    origin = None if is_newest else path
    if not options.auto_resume:
        series.set_aside("not-resumed")
        return Choice(path=_as_given(given), origin=origin)
    try:
        found = series.load_newest()
    except NoValidCheckpointError as damages:
        if not is_newest:
            raise
        _log.warning("%s This fit continues from %s, which ckpt_path stands for.", damages, path)
        found = None
    if found is None:
        return Choice(path=_as_given(given), origin=origin)
    newest, ours = found
    if path is None or (origin is not None and ours[KEY]["origin"] == origin):
        return Choice(path=newest, origin=origin, checkpoint=ours, is_autosave=True)
    if not is_newest and not _is_of_the_run(path, ours):
        return Choice(path=_as_given(given), origin=origin, sets_aside=newest, autosave=newest)
    origin = ours[KEY]["origin"]
    why = _why_not(path, ours)
    if why is None:
        tell(f"{path} is further on than the autosave {newest}: this fit continues from that file.")
        return Choice(path=_as_given(given), origin=origin, autosave=newest)
    why.tell(path, newest)
    return Choice(path=newest, origin=origin, checkpoint=ours, is_autosave=True)


def set_aside(series: AutosaveSeries, choice: Choice) -> None:
    """Set the autosaves aside that `choice` leaves behind."""
    if choice.sets_aside is None:
        return
    aside = series.set_aside("another-ckpt_path")
    _log.warning(
        "This fit starts from %s, the autosaves of this run continue another one: they are now in %s.",
        choice.path, aside,
    )  # fmt: skip


def _as_given(given: Any) -> str | None:
    return None if given is None else str(given)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Why:
    """Why the newest autosave is taken rather than a checkpoint that the user named."""

    reason: str
    is_damage: bool = False

    def tell(self, path: str, newest: str) -> None:
        """Say it, and how to start from that checkpoint all the same."""
        if self.is_damage:
            reason = f"{path} can't be taken, so this run continues from its newest autosave: {self.reason}"
            advice = "To start from that file all the same, pass FaultTolerance(auto_resume=False) once:"
            _log.warning("%s %s the autosaves are then set aside.", reason, worded(advice))
        else:
            tell(
                f"This fit continues from {newest}, the newest autosave of this run: {path} {self.reason}. To start"
                " from that file all the same, pass FaultTolerance(auto_resume=False) once: the autosaves are then set"
                " aside."
            )


def _is_of_the_run(path: str, ours: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint that the user named was written by the run that wrote our autosave.

    Of one that can't be read nobody knows it: it is left to Lightning, as every other file that the user names.
    """
    try:
        part = _content_of(path)[0].get(KEY)
    except Exception as error:  # noqa: BLE001 - torch.load has an error of its own for each kind of damage
        _log.debug("%s can't be read: %s", path, error)
        return False
    return are_of_one_run(part, ours[KEY])


def _why_not(path: str, ours: Mapping[str, Any]) -> _Why | None:
    """Return why our autosave is to be taken rather than a file of this run's, or ``None`` if that is further on.

    One that can't be resumed exactly is never preferred: the autosave is exact, and costs some batches at most. Nor is
    one that can't be taken, damaged or refused by ``weights_only=True``: the fit would fail, at each start again.
    """
    try:
        if _is_unfinished(path):
            raise CheckpointError(f"It has no {METADATA_NAME}: nobody has completed it.")
        theirs, is_refused = _content_of(path)
        part = theirs.get(KEY)
        if progress_of(ours, ours[KEY]) >= progress_of(theirs, part):
            return _Why(reason="is not further on")
        if not _can_be_exact(part):
            return _Why(reason="can't be resumed exactly")
        verify_path(path)
        if not is_refused:
            return None
        reason = "It holds an object that torch.load(weights_only=True) refuses."
    except (FileNotFoundError, IsADirectoryError):
        return None
    except Exception as error:  # noqa: BLE001 - torch.load has an error of its own for each kind of damage
        reason = _damage_of(path) or f"{type(error).__name__}: {error}."
    return _Why(reason=reason, is_damage=True)


def _content_of(path: str) -> tuple[Mapping[str, Any], bool]:
    """Return what a checkpoint holds, or only describes, and whether ``weights_only=True`` refuses it."""
    try:
        return load(path), False
    except pickle.UnpicklingError:
        with open_file(path) as file:
            content: Mapping[str, Any] = read_summary(file, name=path).content
        return content, True


def _is_unfinished(path: str) -> bool:
    """Return whether a checkpoint is a directory of shards without what Lightning writes last."""
    return not is_url(path) and os.path.isdir(path) and not os.path.exists(os.path.join(path, METADATA_NAME))


def _damage_of(path: str) -> str | None:
    try:
        verify_path(path)
    except (OSError, CheckpointError) as damage:
        return str(damage)
    return None


def _can_be_exact(part: Mapping[str, Any] | None) -> bool:
    return part is not None and Position(**part["position"]).is_resumable and not part.get("inexact")
