"""One run's directory: its lock, the series of autosaves of each fit, and when the autosaves are removed.

Autosaves are in ``<dirpath>/<run_id>/fit-<n>/``. ``identity/finding.py`` decides which directory a fit takes.

Lightning may run fits in separate processes, which it creates for each fit (``ddp_spawn``, ``ddp_fork``). The script's
process created the callback and only waits for them. It alone knows how many fits there were and whether the script has
ended well. Its children report to it in a file that only these processes know.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypedDict

from lightning_faulttolerant.checkpoint.autosave_files import fit_folders, fit_number
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.processes import call_at_end
from lightning_faulttolerant.records.ledger import DRILL_VARIABLE
from lightning_faulttolerant.records.runs import RUN_ID_VARIABLE, FitRecord, RunRecord
from lightning_faulttolerant.storage.lock import LOCK_NAME, Lock, open_lock
from lightning_faulttolerant.storage.store import is_url, open_store
from lightning_faulttolerant.trainer.identity.starts import read_record, remove_record, unregister, write_record
from lightning_faulttolerant.trainer.run.history_file import open_history

_log = logging.getLogger(__name__)


class _FitsElsewhere(TypedDict):
    """The fits of a run in other processes: the numbers of those that were begun, and how many have not finished."""

    begun: list[int]
    open: int


class _NotesOfChildren(TypedDict, total=False):
    """What the other processes have noted: fits by run, and what the fits of each callback resumed from."""

    runs: dict[str, _FitsElsewhere]
    reports: dict[str, dict[str, object] | None]


@dataclass(slots=True)
class Script:
    """The process that created a callback. The object travels to the processes that Lightning creates.

    Args:
        process_id: The ID of that process.
        token: A unique text in the name of its file.
        held: The directories of the runs that it holds itself, with the numbers of the fits that it has begun.
        num_callbacks: The number of callbacks that were created.
    """

    process_id: int
    token: str
    held: dict[str, list[int]] = field(default_factory=dict)
    num_callbacks: int = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is not this process."""
        return self.process_id != os.getpid()

    def count_callback(self) -> int:
        """Count a callback that is created, and return its number, from 1."""
        self.num_callbacks += 1
        return self.num_callbacks

    def begun(self, directory: str) -> list[int]:
        """Return the numbers of the fits of a run that were begun, in this process and in those that it created."""
        return sorted({*self.held.get(directory, ()), *self._of_run(directory)["begun"]})

    def num_begun(self) -> int:
        """Return how many fits of all runs were begun, in this process and in those that it created."""
        return sum(len(self.begun(directory)) for directory in {*self.held, *self.directories()})

    def num_open(self, directory: str) -> int:
        """Return how many fits of a run have begun in other processes and not finished."""
        return self._of_run(directory)["open"]

    def begin_fit(self, directory: str, number: int) -> None:
        """Note, in another process, that a fit begins."""
        self._note(directory, begun=[number], more_open=1)

    def end_fit(self, directory: str) -> None:
        """Note, in another process, that a fit finished."""
        self._note(directory, begun=[], more_open=-1)

    def directories(self) -> list[str]:
        """Return the runs that had fits in other processes."""
        return list(self._read().get("runs", {}))

    def tell_report(self, number: int, report: dict[str, object] | None) -> None:
        """Note, in another process, what the fit of the callback with this number resumed from."""
        content = self._read()
        self._write({**content, "reports": {**content.get("reports", {}), str(number): report}})

    def report(self, number: int) -> dict[str, object] | None:
        """Return the report that was last noted for that callback."""
        return self._read().get("reports", {}).get(str(number))

    def forget(self) -> None:
        """Remove the file."""
        if os.path.exists(self._path):
            os.unlink(self._path)

    @property
    def _path(self) -> str:
        return os.path.join(tempfile.gettempdir(), f"lightning_faulttolerant-{self.token}.json")

    def _of_run(self, directory: str) -> _FitsElsewhere:
        return self._read().get("runs", {}).get(directory, {"begun": [], "open": 0})

    def _note(self, directory: str, *, begun: list[int], more_open: int) -> None:
        content, run = self._read(), self._of_run(directory)
        noted: _FitsElsewhere = {"begun": [*run["begun"], *begun], "open": run["open"] + more_open}
        self._write({**content, "runs": {**content.get("runs", {}), directory: noted}})

    def _read(self) -> _NotesOfChildren:
        try:
            with open(self._path, encoding="utf-8") as file:
                content: _NotesOfChildren = json.load(file)
        except FileNotFoundError:
            return {}
        return content

    def _write(self, content: _NotesOfChildren) -> None:
        # A kill at any moment must leave a file that can be read. No other process writes at the same time: the script
        # waits for its children.
        temporary = f"{self._path}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, self._path)


_scripts: list[Script] = []


def this_script(at_end: Callable[[Script], None]) -> Script:
    """Return this process.

    Args:
        at_end: Called when the process ends, if Lightning has created processes for it.
    """
    if not _scripts or _scripts[-1].is_elsewhere:
        script = Script(os.getpid(), uuid.uuid4().hex)
        _scripts[:] = [script]
        call_at_end(lambda: _end(script, at_end), is_remote=True)  # it may be remote, and that becomes known too late
    return _scripts[-1]


def _end(script: Script, at_end: Callable[[Script], None]) -> None:
    if script.is_elsewhere or not script.directories():
        return
    try:
        at_end(script)
    finally:
        script.forget()


_REMOTE_ADVICE = (
    "Check the credentials, the name of the bucket, and the endpoint. The client of the store reads them from "
    "variables such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL, or from fsspec's configuration. "
)
_ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it can name a directory.

    Raises:
        TypeError: If `run_id` is not a string.
        ValueError: If `run_id` can't name a directory.
    """
    if not isinstance(run_id, str):
        raise TypeError(f"run_id must be a string, got {run_id!r}. It names the directory of this run's autosaves.")
    if not _ALLOWED.fullmatch(run_id):
        raise ValueError(
            "run_id must be 1 to 128 letters, digits, dots, dashes, or underscores, and begin with a letter or a "
            f"digit; got {run_id!r}. It names the directory of this run's autosaves."
        )
    return run_id


def run_id_of(own: str | None, default: str, environment: Mapping[str, str]) -> str:
    """Return the run id of a fit.

    In a drill this is an ID of the drill, even if the script sets its own: a drill must not continue a user's run.

    Args:
        own: The run id that was passed to the callback.
        default: The run id of the command.
        environment: The environment of the process.
    """
    if own is not None and not environment.get(DRILL_VARIABLE):
        return own
    if environment.get(RUN_ID_VARIABLE):
        default = check_run_id(environment[RUN_ID_VARIABLE])
    if own is None:
        return default
    joined = f"{default}-{own}"
    if _ALLOWED.fullmatch(joined):
        return joined
    return f"{default}-{hashlib.blake2b(own.encode(), digest_size=6).hexdigest()}"


FITS = threading.RLock()
"""The lock for finding and beginning a fit, or noting its end: threads of one process may train at the same time."""


class _LockOfScript(Lock):
    """The lock that the script's process holds and checks. It waits for this process, which need not do anything."""

    def acquire(self) -> None:
        pass

    def check(self) -> None:
        pass

    def release(self) -> None:
        pass


class RunDirectory:
    """One run's directory, local or in an object store, locked against other processes until this one ends.

    Args:
        directory: The directory of its autosaves.
        script: The process that owns the run: this one, or one that created this one for a fit.
    """

    def __init__(self, directory: str, script: Script) -> None:
        self.directory = directory
        self.fit = 0
        """The number of the fit that was begun last."""
        self.num_open = 0
        """The number of fits that have not finished. A fit that ends with an exception never finishes."""
        self.process_id = os.getpid()
        self._script = script
        self._has_ended = False
        self._store = open_store(directory)
        is_held_by_script = script.is_elsewhere and directory in script.held
        self._lock: Lock = _LockOfScript() if is_held_by_script else open_lock(directory)
        found = self._store.listing()  # before the lock: stores give better errors for a listing
        self.was_killed = LOCK_NAME in found.files
        """Whether an earlier process of this run could not release its lock."""
        self.ends_with_fit = False
        """Whether this process may be killed after its fit without a sign of success, as in a process pool."""
        self.on_end: Callable[[], None] | None = None
        """Called when the run was successful and the autosaves are removed. Default: the run is unregistered."""
        self.history = open_history(directory, check=self._lock.check)
        if is_held_by_script:
            return
        self._lock.acquire()
        try:
            self._store.abort_uploads()
        except BaseException:
            self._lock.release()
            raise
        if not script.is_elsewhere:
            script.held[directory] = []

    @property
    def record(self) -> RunRecord:
        """The record of the run that is kept next to its autosaves."""
        return read_record(self.directory) or RunRecord()

    @property
    def begun(self) -> list[int]:
        """The numbers of the fits that the script has begun, in this process and in those that it created."""
        return self._script.begun(self.directory)

    def fits(self, record: RunRecord) -> dict[int, FitRecord | None]:
        """Return the fits that have autosaves, by number. A fit that is missing from `record` is ``None``."""
        return {fit_number(name): record.fits.get(fit_number(name)) for name in self._fits()}

    def begin_fit(
        self, *, keep_last: int, number: int | None = None, function: str = "fit", incremental: bool = False
    ) -> AutosaveSeries:
        """Begin a fit or an evaluation, and return its series of autosaves.

        Args:
            keep_last: The maximum number of autosaves.
            number: The number of the fit. Default: the number of the script's next fit.
            function: The Trainer's function: ``fit``, ``validate``, ``test``, or ``predict``.
            incremental: Whether the autosaves contain only the tensors that changed.
        """
        self.fit = number or 1 + max(self.begun, default=0)
        self.num_open += 1
        if self._script.is_elsewhere:
            self._script.begin_fit(self.directory, self.fit)
        else:
            self._script.held[self.directory].append(self.fit)
        place = self._store.path(f"{function}-{self.fit}")
        return AutosaveSeries(place, keep_last=keep_last, check=self._lock.check, incremental=incremental)

    def start_again(self, number: int, start: Mapping[str, object]) -> None:
        """Note that a fit or an evaluation starts over, with another start."""
        with FITS:
            write_record(self.directory, self.record.with_fit(number, FitRecord(start=start)))

    def later_autosaves(self) -> list[str]:
        """Return the newest autosave of each fit after the one that was begun last, whether it verifies or not."""
        later = [name for name in self._fits() if fit_number(name) > self.fit]
        return [path for name in later for path in AutosaveSeries(self._store.path(name)).paths()[-1:]]

    def end_fit(self, number: int | None = None) -> None:
        """Note that a fit finished.

        Args:
            number: The number of the fit. Default: the fit that was begun last.
        """
        with FITS:
            self._note_end(self.fit if number is None else number)

    def _note_end(self, number: int) -> None:
        self.num_open -= 1
        record = self.record
        if number in record.fits:
            finished = replace(record.fits[number], is_finished=True)
            write_record(self.directory, record.with_fit(number, finished))
        if self._script.is_elsewhere:
            self._script.end_fit(self.directory)
        elif self.ends_with_fit and not self.num_open:
            self.end()
            _runs.pop(self.directory, None)

    def give_back(self) -> None:
        """Release the directory: no fit has begun in it."""
        self._has_ended = True
        self._script.held.pop(self.directory, None)
        self._lock.release()
        self._remove_if_empty()
        _runs.pop(self.directory, None)

    def leave(self) -> None:
        """Release the directory, in a process created for one fit: no exit handler runs when that process ends."""
        if self._script.is_elsewhere:
            self._lock.release()
            _runs.pop(self.directory, None)

    def end(self) -> None:
        """Remove the autosaves if the run was successful, and release the directory. A second call does nothing."""
        if os.getpid() != self.process_id or self._has_ended:
            return
        self._has_ended = True
        # The interpreter sets these for an uncaught exception.
        uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # If a fit of another run has not finished, neither has the script.
        num_open = sum(
            run.num_open for run in _runs.values() if run.process_id == self.process_id
        ) + self._script.num_open(self.directory)
        ended_well = num_open == 0 and uncaught is None
        try:
            if ended_well and self._has_only_evaluated():
                ended_well = False  # the fit that is unfinished stays as it is
                self._remove_evaluations()
            elif ended_well:
                self.remove()
        except (OSError, CheckpointError) as error:
            _log.warning("The autosaves of this finished run could not be removed from %s: %s", self.directory, error)
        try:
            if ended_well:
                self.history.close()
                (self.on_end or partial(unregister, self.directory))()
        finally:
            self._lock.release()
        if ended_well:
            self._remove_if_empty()

    def _has_only_evaluated(self) -> bool:
        """Return whether this script has run evaluations only, next to a fit that an earlier one has not finished."""
        begun, fits = self.begun, self.record.fits
        is_evaluation = [fit.is_evaluation for number, fit in fits.items() if number in begun]
        unfinished = [fit for number, fit in fits.items() if number not in begun and not fit.is_finished]
        has_only_evaluated = bool(is_evaluation) and all(is_evaluation)
        return has_only_evaluated and any(not fit.is_evaluation for fit in unfinished)

    def _remove_evaluations(self) -> None:
        self._lock.check()
        begun = self.begun
        for name in self._fits():
            if fit_number(name) in begun:
                AutosaveSeries(self._store.path(name), keep_last=1).remove_all()
        record = self.record
        write_record(self.directory, replace(record, fits={n: f for n, f in record.fits.items() if n not in begun}))

    def remove(self) -> None:
        """Remove all autosaves of this run, those of the last fit first.

        If the process is killed during this, the first fits stay finished, and the next process trains the later ones
        again from there.
        """
        self._lock.check()
        for name in reversed(self._fits()):
            AutosaveSeries(self._store.path(name), keep_last=1).remove_all()
        remove_record(self.directory)

    def _fits(self) -> list[str]:
        return fit_folders(self._store.listing().folders)

    def _remove_if_empty(self) -> None:
        try:
            self._store.remove_if_empty()
        except OSError as error:
            _log.debug("%s stays: %s", self.directory, error)


_runs: dict[str, RunDirectory] = {}


def _end_script(script: Script) -> None:
    """End the runs that had all their fits in other processes, like the runs of this process."""
    for directory in script.directories():
        _end_run(directory, script)


def _end_run(directory: str, script: Script) -> None:
    if directory not in _runs and script.num_open(directory):
        return  # its autosaves stay
    try:
        run = _runs.get(directory) or RunDirectory(directory, script)
    except (OSError, CheckpointError) as error:
        _log.warning("The autosaves of this finished run stay in %s: %s", directory, error)
    else:
        run.end()


def this_process() -> Script:
    """Return this process, as the process that creates a callback."""
    return this_script(_end_script)


def directory_of(dirpath: str | os.PathLike[str], run_id: str) -> str:
    """Return the directory of a run, as an absolute path or a URL.

    Args:
        dirpath: The directory of the runs.
        run_id: The name of the run.
    """
    store = open_store(dirpath)
    return store.path(run_id) if is_url(dirpath) else os.path.realpath(store.path(run_id))


def run_of_process(directory: str) -> RunDirectory | None:
    """Return this process's run in a directory, or ``None``."""
    run = _runs.get(directory)
    return run if run is not None and run.process_id == os.getpid() else None


def open_directory(directory: str, script: Script | None = None) -> RunDirectory:
    """Return this process's run in a directory that `directory_of` returned, locked against other processes.

    Args:
        directory: The directory.
        script: The process that created the callback. Default: this one.

    Raises:
        RunInUseError: If another process holds the run.
        CheckpointError: If the directory can't be written.
    """
    run = run_of_process(directory)
    if run is None:
        try:
            run = _runs[directory] = RunDirectory(directory, script or this_process())
        except OSError as error:
            raise CheckpointError(
                f"The autosaves of this run can't be written to {directory}: {error}. Nothing could be resumed. "
                f"{_REMOTE_ADVICE if is_url(directory) else ''}Pass FaultTolerance(dirpath=...) a writable directory."
            ) from error
        if script is None or not script.is_elsewhere:
            call_at_end(run.end, is_remote=is_url(directory))
    return run
