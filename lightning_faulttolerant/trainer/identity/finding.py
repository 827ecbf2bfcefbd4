"""The directory for the autosaves of the fit that begins, the number of that fit, and what the user is told of it.

A run is recognized by what it is, not by its directory alone: ``default_root_dir`` may be a new one at each start. The
rules, and the reasons for them, are in docs/decisions/0038-which-run.md. Messages say which run a fit continues, which
ones it does not, and what to type to choose another.
"""

from __future__ import annotations

import datetime
import functools
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from lightning_faulttolerant.checkpoint.autosave_files import AUTOSAVE_NAME, fit_folders, fit_number
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import CheckpointError, FingerprintMismatchError, RunInUseError
from lightning_faulttolerant.records.history import DEFAULT_FOLDER
from lightning_faulttolerant.records.runs import RUN_ID_VARIABLE, Command, FitRecord, RegisteredRun, Registry, RunRecord
from lightning_faulttolerant.storage.store import is_url, open_store
from lightning_faulttolerant.trainer.identity.fingerprint import (
    Match,
    StartFingerprint,
    match_fit,
    may_run_several,
    sweep,
)
from lightning_faulttolerant.trainer.identity.starts import (
    ProcessStart,
    autosaves_of,
    discard_line,
    hydra_config,
    read_record,
    registry_of_process,
    start_of_process,
    write_record,
)
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import FIT
from lightning_faulttolerant.trainer.process import continued, has_told
from lightning_faulttolerant.trainer.resume.choice import Choice
from lightning_faulttolerant.trainer.run.directory import (
    FITS,
    RunDirectory,
    Script,
    directory_of,
    open_directory,
    run_id_of,
    run_of_process,
)
from lightning_faulttolerant.trainer.settings import Options

_MAX_LINES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """A run that has autosaves, and is not the one that continues.

    Args:
        directory: The directory of the run.
        command: The command that started it.
    """

    directory: str
    command: Command


def tell_interrupted(runs: Sequence[Interrupted], command: Command) -> None:
    """Name the most recently saved interrupted run of the same script when a fit starts from the beginning.

    Args:
        runs: All interrupted runs.
        command: The command of this process.
    """
    newest = max(runs, key=lambda run: _newest(run.directory)[0], default=None)
    if newest is None:
        return
    saved_at, name = _newest(newest.directory)
    when = f", saved {datetime.datetime.fromtimestamp(saved_at):%Y-%m-%d %H:%M}" if saved_at else ""
    match = AUTOSAVE_NAME.fullmatch(name)
    place = f" at epoch {match['epoch']}, batch {match['batch']}" if match else ""
    line = newest.command.line(here=command.directory)
    more = f" There are {len(runs) - 1} more." if len(runs) > 1 else ""
    tell(
        f"This fit starts from the beginning. An interrupted run of {command.name} is{place}{when}:"
        f" {_difference(newest.command, command)}.{more} To continue it, type: {line}, or set"
        f" {RUN_ID_VARIABLE}={shlex.quote(os.path.basename(newest.directory))}"
    )


def tell_passed_over(match: Match, *, run_id: str) -> None:
    """Report once which interrupted fits of this run a new fit does not continue, and why.

    Args:
        match: The result of the search.
        run_id: The id of this run.
    """
    if match.is_guess and "guess" not in has_told:
        has_told.add("guess")
        tell(
            "This trial starts from the beginning: it can't be distinguished from other trials of this sweep. To let "
            'interrupted trials continue, give each its own FaultTolerance(run_id=f"trial-{trial.number}").'
        )
    if not match.passed_over or run_id in has_told:
        return
    has_told.add(run_id)
    number, lines = next(iter(match.passed_over.items()))
    what = "; ".join(lines[:_MAX_LINES]) or "its initial weights"
    tell(f"This fit starts from the beginning. It differs from the interrupted fit {number} of {run_id}: {what}.")


def advise(exception: BaseException, choice: Choice | None) -> None:
    """Append two lines to the error for a run that differs: how to continue it, and how to start over.

    Args:
        exception: The exception that ends a fit.
        choice: The checkpoint that the fit starts from.
    """
    path = "" if choice is None or not choice.is_autosave else str(choice.path)
    directory = path.rpartition("/")[0].rpartition("/")[0]
    record = read_record(directory) if isinstance(exception, FingerprintMismatchError) and path else None
    if record is None:
        return
    exception.args = (
        f"{exception}\n"
        f"To continue the interrupted run, undo the change and type: {record.command.line()}\n"
        f"To start over, type: {discard_line(path)}",
    )


def _newest(directory: str) -> tuple[float, str]:
    """Return the time of a run's newest autosave, as far as it is known, and its name."""
    found = autosaves_of(directory)
    if is_url(directory):
        return (0.0, found[-1][1]) if found else (0.0, "")
    return max(((_saved_at(os.path.join(directory, *one)), one[1]) for one in found), default=(0.0, ""))


def _saved_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _difference(one: Command, other: Command) -> str:
    if one.arguments != other.arguments:
        return f"it was started with other arguments ({shlex.join(one.arguments) or 'none'})"
    if one.task != other.task:
        return f"it is another task of the job array ({one.task or 'none'})"
    if one.script != other.script:
        return f"it was started from {one.script}, with another model, data, or settings"
    return "it was started with another model, data, or settings"


_LOOK_EVERY_SECONDS = 0.25
# Digits that look like a time, or like a random name: 2026-11-24, 20261124, 1a2b3c4d.
_NAMED_BY_TIME = re.compile(r"\d{6}|\d{2,4}[-_.:]\d{1,2}[-_.:]\d{1,2}|\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b")
_MAX_SIBLINGS = 20
_ALIKE, _EXACTLY = 1, 2

"""Maps the directory in which this process would have started a run to the directory that it continues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFit:
    """The place of a fit's autosaves.

    Args:
        run: The run of the fit, held by this process.
        series: The autosaves.
        number: The number of the fit in the run.
        start: How it started first.
    """

    run: RunDirectory
    series: AutosaveSeries
    number: int
    start: Mapping[str, Any]


class Finder:
    """Finds the run and the number of one fit.

    Args:
        options: The options of the callback.
        default_root_dir: The Trainer's ``default_root_dir``.
        fingerprint: How the fit starts.
        function: The Trainer's function that begins.
    """

    def __init__(
        self, options: Options, default_root_dir: str, fingerprint: StartFingerprint, *, function: str = FIT
    ) -> None:
        self._options = options
        self._default_root_dir = default_root_dir
        self._function = function
        self.fingerprint = self._fingerprint = fingerprint
        """How the fit starts."""
        self._dirpath = options.dirpath or open_store(default_root_dir).path(DEFAULT_FOLDER)
        self._start: ProcessStart = start_of_process(sys.argv, os.environ, resume_from=options.resume_from)
        self._run_id = run_id_of(options.run_id, self._start.run_id, os.environ)
        self._has_name = options.run_id is not None or bool(os.environ.get(RUN_ID_VARIABLE))
        self._registry: Registry | None = registry_of_process(self._start.command.directory)
        self._script: Script = options.script
        self._is_sweep = sweep() is not None

    @property
    def run_id(self) -> str:
        """The run id of the fit's run."""
        return self._run_id

    def with_options(self, options: Options) -> Finder:
        """Return a finder for the same fit with other options.

        Args:
            options: The options of the callback.
        """
        return Finder(options, self._default_root_dir, self._fingerprint, function=self._function)

    def find(self) -> FoundFit:
        """Open the run, and begin the fit in it.

        Raises:
            RunInUseError: If another process has the run, and keeps it.
            CheckpointError: If the directory of the run can't be written to.
        """
        run = self._open()
        with FITS:
            known = run.record
            match = self._match(run, known)
            series = run.begin_fit(
                keep_last=self._options.keep_last,
                number=match.number,
                function=self._function,
                incremental=self._options.incremental,
            )
            autosaves = series.paths()
            fit = known.fits.get(match.number) if autosaves else None
            # From the first start, with what later ones accept.
            start = self._fingerprint.state_dict() if fit is None else self._fingerprint.continuing(fit.start)
            record = (known if known.run_id else self._record(run)).with_fit(match.number, FitRecord(start=start))
            write_record(run.directory, record)
        self._register(run, record)
        if not autosaves:
            tell_passed_over(match, run_id=os.path.basename(run.directory))
            if len(run.begun) == 1:
                tell_interrupted(self._interrupted(run), self._start.command)
        return FoundFit(run=run, series=series, number=match.number, start=start)

    def look(self) -> str | None:
        """Return the directory of the run that would continue; ``None`` if there is none. Nothing is opened."""
        is_one_of_many = (self._start.is_one_of_many or self._is_sweep) and not self._has_name
        stem = f"{self._run_id}-{self._fingerprint.name}" if is_one_of_many and not self._is_sweep else self._run_id
        default = directory_of(self._dirpath, stem)
        if fit_folders(open_store(default).listing().folders):
            return default
        return self._elsewhere(default)

    def place_in(self, directory: str | None, begun: list[int]) -> tuple[int, list[str]]:
        """Return the number that the fit has in a run, and the differences that it accepts, without opening the run.

        Args:
            directory: The directory of the run; ``None`` if there is none.
            begun: The numbers of the fits that the script has begun.
        """
        names = [] if directory is None else fit_folders(open_store(directory).listing().folders)
        record = (None if directory is None else read_record(directory)) or RunRecord()
        fits = {fit_number(name): record.fits.get(fit_number(name)) for name in names}
        found = match_fit(fits, begun, self._fingerprint, runs_several=lambda: len(fits) > 1).number
        return found, self._fingerprint.continuing(record.fits.get(found, FitRecord()).start)["accepted"]

    def begun_in(self, run: RunDirectory, *, number: int, accepted: list[str]) -> FoundFit:
        """Begin the fit in a run, under a number.

        Args:
            run: The run.
            number: The number of the fit.
            accepted: The differences that it accepts.
        """
        series = run.begin_fit(keep_last=1, number=number, function=self._function)
        start = {**self._fingerprint.state_dict(), "accepted": accepted}
        return FoundFit(run=run, series=series, number=number, start=start)

    def _open(self) -> RunDirectory:
        is_one_of_many = self._start.is_one_of_many or self._is_sweep
        if is_one_of_many and not self._has_name and not self._script.is_elsewhere:
            return self._open_one_of_many()
        default = directory_of(self._dirpath, self._run_id)
        directory = continued.get(default, default)
        if run_of_process(directory) is not None or autosaves_of(directory):
            return self._open_patiently(directory)
        elsewhere = self._elsewhere(default)
        run = None if elsewhere is None else self._continue(elsewhere)
        if run is None:
            return self._open_patiently(default)
        continued[default] = run.directory
        return run

    def _open_patiently(self, directory: str) -> RunDirectory:
        """Open a run; wait for as long as the previous process may take to end."""
        deadline = time.monotonic() + self._options.grace_seconds
        found = _opened(directory, self._script)
        if isinstance(found, RunInUseError):
            tell(f"{found} Waiting up to {self._options.grace_seconds:g} s for it to end.")
        while isinstance(found, RunInUseError):
            if time.monotonic() > deadline:
                raise found
            time.sleep(_LOOK_EVERY_SECONDS)
            found = _opened(directory, self._script)
        return found

    def _continue(self, directory: str) -> RunDirectory | None:
        """Open a run that was started in another directory; ``None`` if its process keeps it, or has finished it."""
        try:
            run = self._open_patiently(directory)
        except (RunInUseError, CheckpointError, OSError) as error:
            tell(f"This run can't continue the one in {directory}, and starts in a directory of its own: {error}")
            return None
        if autosaves_of(directory):
            return run
        run.give_back()
        return None

    def _open_one_of_many(self) -> RunDirectory:
        """Open a directory that no other process holds: if possible one with a fit that starts alike, else a new one.

        The processes of a sweep have numbered directories, each for all fits of its process. Otherwise a directory is
        named after how its fit starts.
        """
        stem = self._run_id if self._is_sweep else f"{self._run_id}-{self._fingerprint.name}"
        numbers = range(2, 1 + _num_of(self._dirpath, stem))
        here = [directory_of(self._dirpath, name) for name in (stem, *(f"{stem}-{number}" for number in numbers))]
        known = sorted([*self._alike_elsewhere(stem, here), *here], key=self._likeness, reverse=True)
        new = (directory_of(self._dirpath, f"{stem}-{number}") for number in count(1 + len(here)))
        run = next(run for path in chain(known, new) if (run := self._open_if_free(path)))
        run.ends_with_fit = self._start.is_killed_at_end
        return run

    def _alike_elsewhere(self, stem: str, here: list[str]) -> list[str]:
        """Return the directories of runs with this name that began elsewhere and have a fit that starts alike."""
        entries = self._entries if self._options.dirpath is None else []
        paths = [e.directory for e in entries if e.run_id == stem or e.run_id.startswith(f"{stem}-")]
        return [path for path in paths if path not in here and self._likeness(path) >= _ALIKE]

    def _likeness(self, directory: str) -> int:
        """Return how closely this fit resembles the most similar fit of the run in a directory."""
        record = read_record(directory)
        starts = [] if record is None else [fit.start for fit in record.fits.values()]
        if any(map(self._fingerprint.is_exactly, starts)):
            return _EXACTLY
        return _ALIKE if any(map(self._fingerprint.is_alike, starts)) else 0

    def _open_if_free(self, directory: str) -> RunDirectory | None:
        own = run_of_process(directory)
        if own is not None and own.num_open and not self._is_sweep:
            return None  # a thread, or a fit inside another fit
        try:
            run = _opened(directory, self._script)
        except CheckpointError:
            if directory.startswith(directory_of(self._dirpath, "").rstrip("/")):
                raise
            return None  # a run of another start, in a place that no longer exists
        if isinstance(run, RunInUseError):
            return None
        fits = [fit for number, fit in run.fits(run.record).items() if number not in run.begun]
        if self._is_sweep or all(fit is not None and self._fingerprint.has_data(fit.start) for fit in fits):
            return run
        if own is None:
            run.give_back()
        return None

    def _elsewhere(self, default: str) -> str | None:
        """Return the directory in which this run was started, if it is not `default`."""
        known = self._entries if self._options.dirpath is None else []
        same = {e.directory: self._likeness(e.directory) for e in known if self._is_same(e)}
        found = [path for path, likeness in same.items() if likeness == _EXACTLY]
        # Without a seed, the weights differ at each start. A user who names another directory may mean another run.
        found += [path for path, likeness in same.items() if likeness == _ALIKE and self._is_volatile(path)]
        if not self._has_name:
            runs = {entry.directory: entry.command for entry in known} | self._siblings
            alike = [path for path, command in runs.items() if command.is_alike(self._start.command)]
            found += [path for path in alike if path not in same and self._likeness(path) == _EXACTLY]
        return next((path for path in found if path != default), None)

    def _is_same(self, entry: RegisteredRun) -> bool:
        return entry.run_id == self._run_id and entry.command.name == self._start.command.name

    def _is_volatile(self, directory: str) -> bool:
        """Return whether the directory differs at each start: it is Hydra's, or it is named after the time."""
        if hydra_config() is not None:
            return True
        here, there = (path.split("/") for path in (str(self._dirpath), directory))
        differing = [pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]]
        return bool(differing) and all(_NAMED_BY_TIME.search(name) for pair in differing[:1] for name in pair)

    @functools.cached_property
    def _entries(self) -> list[RegisteredRun]:
        """The interrupted runs of this script in the registry, without those that this process has open."""
        entries = [] if self._registry is None else self._registry.entries()
        own = [entry for entry in entries if entry.command.name == self._start.command.name]
        return [e for e in own if run_of_process(e.directory) is None and autosaves_of(e.directory)]

    @functools.cached_property
    def _siblings(self) -> dict[str, Command]:
        """The interrupted runs of the same script with autosaves in the same place, by directory."""
        stem = self._start.run_id.rpartition("-")[0]
        try:
            folders = open_store(self._dirpath).listing().folders
        except (OSError, CheckpointError):
            return {}
        names = [name for name in folders if name.startswith(f"{stem}-")][-_MAX_SIBLINGS:]
        paths = [path for name in names if run_of_process(path := directory_of(self._dirpath, name)) is None]
        records = {path: record for path in paths if (record := read_record(path)) is not None}
        return {path: record.command for path, record in records.items() if autosaves_of(path)}

    def _match(self, run: RunDirectory, record: RunRecord) -> Match:
        fits = run.fits(record)

        def runs_several() -> bool:
            return len(fits) > 1 or self._start.is_one_of_many or may_run_several()

        return match_fit(fits, run.begun, self._fingerprint, runs_several=runs_several, is_sweep=self._is_sweep)

    def _record(self, run: RunDirectory) -> RunRecord:
        return RunRecord(run_id=os.path.basename(run.directory), command=self._start.command, began=time.time())

    def _register(self, run: RunDirectory, record: RunRecord) -> None:
        registry = self._registry
        if registry is None or run.on_end is not None:
            return
        entry = RegisteredRun(
            run_id=os.path.basename(run.directory), directory=run.directory, command=record.command, began=record.began
        )
        try:
            registry.add(entry)
        except OSError as error:
            tell(f"The registry of runs can't be written, so a start elsewhere won't find this run: {error}")
            return
        run.on_end = lambda: registry.remove(run.directory)

    def _interrupted(self, run: RunDirectory) -> list[Interrupted]:
        """Return the interrupted runs of the same script."""
        found = {entry.directory: entry.command for entry in self._entries} | self._siblings
        found.pop(run.directory, None)
        return [
            Interrupted(directory=path, command=command)
            for path, command in found.items()
            if command.name == self._start.command.name
        ]


def _opened(directory: str, script: Script) -> RunDirectory | RunInUseError:
    """Open a run, or return the error if another process has it."""
    try:
        return open_directory(directory, script)
    except RunInUseError as error:
        return error


def _num_of(dirpath: str, prefix: str) -> int:
    """Return the highest number of the directories that begin with `prefix`."""
    names = open_store(dirpath).listing().folders
    numbers = (name.removeprefix(f"{prefix}-") for name in names if name.startswith(f"{prefix}-"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
