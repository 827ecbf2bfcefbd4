"""The run that is replayed: it is found as a resume finds it, but only read. The replay has its own run."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_faulttolerant.checkpoint.autosave_files import incident_paths, kept_paths, sequence_of
from lightning_faulttolerant.checkpoint.schema import KEY
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_path
from lightning_faulttolerant.errors import ReplayError, UnsafeCheckpointError
from lightning_faulttolerant.records.history import END, FINISHED, STOPPED
from lightning_faulttolerant.records.ledger import FIT
from lightning_faulttolerant.records.replay import ReplayRequest, ReplayStart, StepPlace, write_start
from lightning_faulttolerant.storage.store import open_store
from lightning_faulttolerant.trainer.files.run_files import load
from lightning_faulttolerant.trainer.identity.finding import Finder, FoundFit
from lightning_faulttolerant.trainer.ledger.requested import own_path_of
from lightning_faulttolerant.trainer.position import TrainerPosition, progress_of
from lightning_faulttolerant.trainer.resume.choice import Choice
from lightning_faulttolerant.trainer.run.directory import open_directory
from lightning_faulttolerant.trainer.run.history_file import open_history
from lightning_faulttolerant.trainer.settings.options import Options

_log = logging.getLogger(__name__)


class ReplayedRun:
    """Finds the fit in the run that a fit of the replay stands for, and the autosave that it continues from.

    Args:
        options: The options that the script passed.
        request: The request for the replay.
    """

    def __init__(self, options: Options, request: ReplayRequest) -> None:
        self._options = options
        self._request = request
        self._directory: str | None = None
        self._number = 0

    def find(self, finder: Finder) -> FoundFit:
        """Begin the fit in the directory of the replay, under the number that it has in the run."""
        run = open_directory(self._request.path("run"), self._options.script)
        run.on_end = _do_nothing
        self._directory = finder.look()
        self._number = finder.number_in(self._directory, run.begun)
        return finder.begun_in(run, number=self._number, keep_last=1)

    def choose(self, given: object) -> Choice:
        """Return what the fit starts from: the newest autosave that is not after the first step of interest.

        A fit before the one that is replayed continues from its newest autosave.

        Args:
            given: The path that Lightning derived from the ``ckpt_path`` of this fit.

        Raises:
            ReplayError: If the request is for the run's exception, and its history tells of none.
        """
        is_replayed = self._number == self._request.fit
        exception, place = self._exception() if is_replayed and self._request.is_of_exception else (None, None)
        limit = (self._request.since or place) if is_replayed else None
        left_out = (
            [StepPlace(epoch=epoch, batch=batch) for epoch, batch in self._request.without] if is_replayed else []
        )
        found = self._newest([*left_out, *([] if limit is None else [limit])])
        if is_replayed:
            start = ReplayStart(
                run=self._directory,
                autosave=None if found is None else found[0],
                number=0 if found is None else int(progress_of(found[1], found[1][KEY])),
                ledger=own_path_of(self._options),
                exception=exception,
                place=place,
            )
            write_start(self._request, start)
        if found is None:
            return Choice(path=None if given is None or _is_too_late(str(given), limit) else str(given), origin=None)
        path, checkpoint = found
        return Choice(path=path, origin=checkpoint[KEY]["origin"], checkpoint=checkpoint, is_autosave=True)

    def _newest(self, limits: Sequence[StepPlace]) -> tuple[str, dict[str, Any]] | None:
        """Return the newest autosave that verifies, with its content.

        Args:
            limits: The steps that it must not be after.
        """
        if self._directory is None:
            return None
        series = AutosaveSeries(open_store(self._directory).path(f"{FIT}-{self._number}"), keep_last=1)
        paths = [*kept_paths(series.store), *series.paths()]
        newest_first = sorted(paths, key=lambda path: sequence_of(os.path.basename(path)), reverse=True)
        autosave = _first(newest_first, limits)
        incident = _first(reversed(incident_paths(series.store)), limits) if limits else None
        if autosave is None or incident is None:
            return autosave or incident
        # Of two with the same state, the one that is named after the step.
        return max(incident, autosave, key=lambda one: progress_of(one[1], one[1][KEY]))

    def _exception(self) -> tuple[str, StepPlace]:
        """Return the exception that ended the fit last, and the step in which it was raised."""
        lines = [] if self._directory is None else open_history(self._directory, check=_do_nothing).lines()
        ends = [line for line in lines if line.get("event") == END and line.get("fit") == self._number]
        reason = str(ends[-1]["reason"]) if ends else "no end"
        if not ends or reason == FINISHED or reason.startswith(STOPPED):
            raise ReplayError(
                f"The history of the run in {self._directory} shows no exception in fit {self._number}, but"
                f" {reason}. There is none to replay. Name a step instead: --until STEP."
            )
        return str(ends[-1]["text"]), StepPlace(epoch=ends[-1]["epoch"], batch=ends[-1]["batch"])


def _first(paths: Iterable[str], limits: Sequence[StepPlace]) -> tuple[str, dict[str, Any]] | None:
    found = (_read(path, limits) for path in paths)
    return next((one for one in found if one is not None), None)


def _read(path: str, limits: Sequence[StepPlace]) -> tuple[str, dict[str, object]] | None:
    """Return an autosave and its content, unless it is after one of `limits`, or can't be used."""
    try:
        is_late = bool(limits) and any(map(_place_of(path).is_after, limits))
        return None if is_late else (path, load_path(path))
    except UnsafeCheckpointError:  # the older ones would hold the object, too
        raise
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:  # nothing is renamed: the files are the run's
        _log.warning("%s can't be used: %s The replay passes it over.", path, error)
        return None


def _is_too_late(path: str, limit: StepPlace | None) -> bool:
    """Return whether a checkpoint that Lightning would start from, such as the run's own last one, is after `limit`."""
    try:
        return limit is not None and _place_of(path).is_after(limit)
    except (OSError, RuntimeError, pickle.UnpicklingError):  # Lightning's to read, or to refuse
        return False


def _place_of(path: str) -> StepPlace:
    """Return the step that an autosave is before."""
    checkpoint = load(path)
    part = checkpoint.get(KEY)
    number = progress_of(checkpoint, part)
    if number == float("inf"):  # after the end of the fit
        return StepPlace(number=2**63, epoch=2**63, batch=0)
    if part is None:
        return StepPlace(number=int(number), epoch=checkpoint.get("epoch", 0), batch=0)
    position = TrainerPosition(**part["position"])
    return StepPlace(number=int(number), epoch=position.epoch, batch=position.batch)


def _do_nothing() -> None:
    """Do nothing."""
