"""Runs that begin from an autosave of another run: a branch, and a replay.

A branch is in a directory with another name, which follows from the request alone. So the same command, typed again,
continues the branch from its own autosaves, even if the parent's autosave no longer exists. Nothing of the parent is
opened, locked, renamed, or written.

A run that is replayed is found as a resume finds it, but only read. The replay has its own run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, final

from lightning_faulttolerant.checkpoint.autosave_files import (
    AUTOSAVE_NAME,
    KEPT_FOLDER,
    SUPERSEDED_NAME,
    fit_number,
    incident_paths,
    is_kept,
    kept_paths,
    sequence_of,
)
from lightning_faulttolerant.checkpoint.schema import KEY, checked_part
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_path
from lightning_faulttolerant.errors import BranchError, ReplayError, UnsafeCheckpointError
from lightning_faulttolerant.records.history import END, FINISHED, FIT, name_of
from lightning_faulttolerant.records.requests import ReplayRequest, ReplayStart, StepPlace, write_start
from lightning_faulttolerant.records.runs import Parent
from lightning_faulttolerant.storage.store import open_store
from lightning_faulttolerant.trainer.files.run_files import load, part_of
from lightning_faulttolerant.trainer.identity.finding import Finder, FoundFit
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import TrainerPosition, progress_of
from lightning_faulttolerant.trainer.resume.choice import Choice, origin_of
from lightning_faulttolerant.trainer.run.directory import open_directory
from lightning_faulttolerant.trainer.run.history_file import open_history
from lightning_faulttolerant.trainer.settings import PLACE, Options

_log = logging.getLogger(__name__)

_ALLOWED_LENGTH = 128
_MAX_NAMED = 20


@final
class Branch:
    """Finds the run of a branch, and the autosave that it begins from.

    Args:
        options: The options of the callback, which say where it begins.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._source = options.resume_from
        self._path = None if PLACE.fullmatch(self._source) else self._source.rstrip("/")
        self._parent: str | None = None
        self._found: str | None = None

    @property
    def fit(self) -> int:
        """The number of the fit that begins from the autosave, from 1. Fits before it begin at their beginning."""
        return 1 if self._path is None else fit_number(_fit_folder(self._path)) or 1

    def find(self, finder: Finder) -> FoundFit:
        """Open the run of the branch, and begin the fit in it.

        Args:
            finder: Finds the run that the command has without the request.
        """
        if self._path is None:
            self._parent = finder.look()
        own = self.finder(finder)
        if own.look() is None:  # before anything is written
            self._found = self._autosave()
        return own.find()

    def finder(self, finder: Finder) -> Finder:
        """Return what finds the run of the branch.

        Args:
            finder: Finds the run that the command has without the request.
        """
        return finder.with_options(replace(self._options, run_id=self._run_id(finder.run_id)))

    def _run_id(self, run_id: str) -> str:
        key = self._source.replace(":", "-") if self._path is None else _key_of(self._path)
        name = f"{run_id}-from-{key}"
        if len(name) <= _ALLOWED_LENGTH:
            return name
        digest = hashlib.blake2b(run_id.encode(), digest_size=6).hexdigest()
        return f"{run_id[: _ALLOWED_LENGTH - len(key) - 20]}-{digest}-from-{key}"

    def begins(self, found: FoundFit) -> bool:
        """Return whether a fit begins from the parent's autosave, rather than from its own.

        Args:
            found: The place of the fit's autosaves.
        """
        if not self._options.auto_resume:
            found.series.set_aside("not-resumed")
        return found.number == self.fit and not found.series.paths()

    def choose(self, given: object) -> Choice:
        """Return what the fit begins from.

        Args:
            given: The path that Lightning derived from the ``ckpt_path`` of this fit. It is not taken.

        Raises:
            BranchError: If there is no such autosave.
            DamagedCheckpointError: If it does not verify.
        """
        path = self._found or self._autosave()
        try:
            checkpoint = load_path(path)
        except FileNotFoundError:  # pruning has moved it meanwhile, or there never was one
            path = self._moved(path)
            checkpoint = load_path(path)
        if KEY not in checkpoint:
            raise BranchError(
                f"{path} is not an autosave of this package. A branch begins from an autosave, because only that holds"
                " the whole state. Pass the file as ckpt_path to fit instead."
            )
        part = checked_part(checkpoint[KEY], path)
        position = TrainerPosition.from_state_dict(part["position"])
        directory = _run_directory(path)
        parent = Parent(
            run_id=name_of(directory),
            directory=directory,
            autosave=name_of(path),
            epoch=position.epoch,
            batch=position.batch,
            global_step=position.global_step,
        )
        tell(f"This run is a branch of {parent.run_id}, and begins from its {parent.place}.")
        return Choice(path=path, origin=origin_of(given), checkpoint=checkpoint, is_autosave=True, parent=parent)

    def _moved(self, path: str) -> str:
        folder, name = path.rpartition("/")[::2]
        moved = f"{folder}/{KEPT_FOLDER}/{name}"
        if not _is_there(moved):
            raise BranchError(f"{path} does not exist. {self._instead(self._candidates(_run_directory(path)))}")
        return moved

    def _autosave(self) -> str:
        if self._path is not None:
            _epoch_and_batch(self._path)  # or it is not the name of an autosave
            return self._path if _is_there(self._path) else self._moved(self._path)
        candidates = [] if self._parent is None else self._candidates(self._parent)
        if self._source.isdecimal():
            steps = {path: _step_of(path) for path in candidates}
            found = [path for path, step in steps.items() if step == int(self._source)]
        else:
            epoch, batch = self._source.split(":")
            found = [path for path in candidates if _epoch_and_batch(path) == (int(epoch), int(batch))]
        kept = [path for path in found if is_kept(name_of(path))]
        if not found:
            what = f"step {self._source}" if self._source.isdecimal() else f"batch {batch} of epoch {epoch}"
            where = "no run of this command was found" if self._parent is None else f"none is kept in {self._parent}"
            raise BranchError(f"There is no autosave of {what}: {where}. {self._instead(candidates)}")
        return (kept or found)[-1]

    def _candidates(self, directory: str) -> list[str]:
        """Return the autosaves of the fit in a run, in the order of saving."""
        series = AutosaveSeries(open_store(directory).path(f"{FIT}-{self.fit}"), keep_last=1)
        return sorted([*kept_paths(series.store), *series.paths()], key=name_of)

    def _instead(self, candidates: list[str]) -> str:
        if not candidates:
            return (
                "If the run was started by another command, name the path of an autosave, as `lightning-faulttolerant"
                " list` shows it. FlightRecorder(keep_every=...) keeps autosaves for branches."
            )
        named = [f"{_step_of(path)} ({':'.join(map(str, _epoch_and_batch(path)))})" for path in candidates]
        more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
        listed = ", ".join(named[:_MAX_NAMED])
        return f"There are autosaves of these steps (EPOCH:BATCH): {listed}{more}. Name one: --from STEP."


def _is_there(path: str) -> bool:
    folder, name = path.rpartition("/")[::2]
    listing = open_store(folder).listing()
    return name in (*listing.files, *listing.folders)


def _fit_folder(path: str) -> str:
    """Return the name of the directory of the fit that an autosave is in."""
    folder = name_of(path.rpartition("/")[0])
    if folder == KEPT_FOLDER or SUPERSEDED_NAME.fullmatch(folder) is not None:
        return name_of(path.rpartition("/")[0].rpartition("/")[0])
    return folder


def _run_directory(path: str) -> str:
    """Return the directory of the run that an autosave is in."""
    folder = path.rpartition("/")[0]
    if not fit_number(name_of(folder)):
        folder = folder.rpartition("/")[0]
    return folder.rpartition("/")[0]


def _key_of(path: str) -> str:
    """Return a name for an autosave that stays when pruning moves it."""
    folder, name = path.rpartition("/")[::2]
    folder = folder.removesuffix(f"/{KEPT_FOLDER}")
    epoch, batch = _epoch_and_batch(path)
    digest = hashlib.blake2b(f"{os.path.normpath(folder)}/{name}".encode(), digest_size=4).hexdigest()
    return f"{epoch}-{batch}-{digest}"


def _epoch_and_batch(path: str) -> tuple[int, int]:
    match = AUTOSAVE_NAME.fullmatch(name_of(path))
    if match is None:
        raise BranchError(
            f"--from is {path}, which is not the name of an autosave. Name a number of optimizer steps,"
            " EPOCH:BATCH, or the path of an autosave, as `lightning-faulttolerant list` shows it."
        )
    return int(match["epoch"]), int(match["batch"])


def _step_of(path: str) -> int | None:
    part = part_of(path)
    return None if part is None else part["position"]["global_step"]


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
        self._number, accepted = finder.place_in(self._directory, run.begun)
        return finder.begun_in(run, number=self._number, accepted=accepted)

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
                ledger=self._options.ledger,
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
        if not ends or reason == FINISHED or ends[-1].get("by"):
            raise ReplayError(
                f"Fit {self._number} of the run in {self._directory} did not end with an exception: its history says"
                f" {reason!r}. Name the step to replay instead: --until STEP."
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
        _log.warning("The replay skips %s, which can't be used: %s", path, error)
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
