"""Whether the files of a run that a fit resumes from are its own, to resume in, or another run's, to be left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_faulttolerant.records.history import DONE, END, STOPPED
from lightning_faulttolerant.trainer.choice import Choice
from lightning_faulttolerant.trainer.files.parts import MARK, are_of_one_run, part_of
from lightning_faulttolerant.trainer.files.run_files import RunFiles
from lightning_faulttolerant.trainer.position import FINISHED
from lightning_faulttolerant.trainer.run import Run


def go_on_in_files(files: RunFiles, run: Run, choice: Choice) -> None:
    """Let the files of the run that `choice` is of be continued in; to be called before loggers begin theirs.

    An autosave is always of the run itself. Another checkpoint is taken for one of it only where autosaves say that it
    was killed: who begins again from a file of a run that came to its end must not lose what that has logged after it.
    """
    _go_on(files, run, choice)
    if not files.has_config:
        return
    ended_at_once = choice.autosave is None and (run.was_killed or _was_stopped(run))
    if files.goes_on or choice.is_autosave or ended_at_once:
        files.let_config_be_there()


def _was_stopped(run: Run) -> bool:
    """Return whether the last that is told of the run's end is a stop: it may come before there is anything to save."""
    try:
        ends = [line for line in run.history.lines() if line.get("event") in (END, DONE)]
    except Exception as error:  # noqa: BLE001 - training has nothing to do with it
        run.history.announce(error)
        return False
    return bool(ends) and str(ends[-1].get("reason")).startswith(STOPPED)


def _go_on(files: RunFiles, run: Run, choice: Choice) -> None:
    part = choice.part
    if part is None and choice.autosave is not None:
        autosave, given = part_of(choice.autosave), part_of(choice.path)
        # Another run's may lie in the same directory: it must not lose what it has logged and saved after that file.
        part = given if not _is_finished(autosave) and are_of_one_run(given, autosave) else None
    if part is not None and MARK in part:
        files.mark = part[MARK]
    written = _written(part)
    if part is None or written is None or part.get("inexact"):
        return
    # A fit that came to its end must not take from a later one what that has logged to the same files.
    later = run.later_autosaves() if _is_finished(part) else []
    own = choice.path if choice.is_autosave else choice.autosave
    files.resume_loggers(written, later=[_written(part_of(path)) for path in later], autosave=own or "")
    files.goes_on = True


def _is_finished(part: Mapping[str, Any] | None) -> bool:
    return part is not None and part["position"]["where"] == FINISHED


def _written(part: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what a checkpoint says of files beside it; nothing where it was saved before the first batch."""
    return part["ranks"][0].get("files") if part is not None else None
