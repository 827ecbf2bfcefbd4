"""Whether the files of the checkpoint's run are this run's own, to continue, or another run's, to be left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_faulttolerant.records.history import DONE, END, STOPPED
from lightning_faulttolerant.trainer.files.parts import MARK, are_of_one_run, part_of
from lightning_faulttolerant.trainer.files.run_files import RunFiles
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.resume.choice import Choice
from lightning_faulttolerant.trainer.run.directory import RunDirectory


def go_on_in_files(files: RunFiles, run: RunDirectory, choice: Choice) -> None:
    """Continue the files of the run that `choice` belongs to. Call it before loggers begin their own.

    An autosave always belongs to the run itself. Another checkpoint counts as the run's only if autosaves show that the
    run was killed. A user who starts again from a file of a finished run must not lose what that run logged after it.
    """
    _go_on(files, run, choice)
    if not files.has_config:
        return
    ended_at_once = choice.autosave is None and (run.was_killed or _was_stopped(run))
    if files.continues or choice.is_autosave or ended_at_once:
        files.let_config_be_there()


def _was_stopped(run: RunDirectory) -> bool:
    """Return whether the last recorded end of the run is a stop: it may come before there is anything to save."""
    try:
        ends = [line for line in run.history.lines() if line.get("event") in (END, DONE)]
    except Exception as error:  # noqa: BLE001 - training does not depend on it
        run.history.announce(error)
        return False
    return bool(ends) and str(ends[-1].get("reason")).startswith(STOPPED)


def _go_on(files: RunFiles, run: RunDirectory, choice: Choice) -> None:
    part = choice.part
    if part is None and choice.autosave is not None:
        autosave, given = part_of(choice.autosave), part_of(choice.path)
        # The file may be of another run in the same directory: that run must not lose what it logged and saved later.
        part = given if not _is_finished(autosave) and are_of_one_run(given, autosave) else None
    if part is not None and MARK in part:
        files.mark = part[MARK]
    written = _written(part)
    if part is None or written is None or part.get("inexact"):
        return
    # A finished fit must not drop what a later fit has logged to the same files.
    # Nor must an evaluation that ended by an exception which the script caught.
    later = run.later_autosaves() if _is_finished(part) or _is_of_evaluation(part) else []
    own = choice.path if choice.is_autosave else choice.autosave
    files.resume_loggers(written, later=[_written(part_of(path)) for path in later], autosave=own or "")
    files.continues = True


def _is_of_evaluation(part: Mapping[str, Any]) -> bool:
    return TrainerPosition(**part["position"]).is_of_evaluation


def _is_finished(part: Mapping[str, Any] | None) -> bool:
    return part is not None and TrainerPosition(**part["position"]).is_finished


def _written(part: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what a checkpoint records about the files next to it; ``None`` if it was saved before the first batch."""
    return part["ranks"][0].get("files") if part is not None else None
