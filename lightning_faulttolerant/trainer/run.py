"""Which run this is: where its autosaves lie, which of them a fit goes on from, and when they are removed.

Autosaves lie in ``<dirpath>/<run_id>/fit-<n>/``: the same command finds its own again, a sweep in one directory does
not mix, and the second fit of a script is told from the first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from lightning_faulttolerant.checkpoint.lock import LOCK_NAME
from lightning_faulttolerant.checkpoint.locks import open_lock
from lightning_faulttolerant.checkpoint.process_end import call_at_end
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.store import is_url, open_store
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.records.ledger import DRILL_VARIABLE
from lightning_faulttolerant.trainer.history_file import open_history
from lightning_faulttolerant.trainer.launched import Script, this_script

_log = logging.getLogger(__name__)

RUN_ID_VARIABLE = "PL_FAULT_TOLERANT_RUN_ID"
# The task's number in a job array; a job's own id is another one each time it is submitted.
_ARRAY_VARIABLES = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "LSB_JOBINDEX", "SGE_TASK_ID")
_STEM_LENGTH = 64
_REMOTE_ADVICE = (
    "Look at the credentials, the name of the bucket and the endpoint: they are taken from where the client of that"
    " store takes them, such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL, or fsspec's own configuration. "
)
_ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it can name a directory.

    Raises:
        TypeError: If it is no string.
        ValueError: If it can't.
    """
    if not isinstance(run_id, str):
        raise TypeError(f"run_id must be a string, got {run_id!r}. It names the directory of this run's autosaves.")
    if not _ALLOWED.fullmatch(run_id):
        raise ValueError(
            f"run_id must be 1 to 128 letters, digits, dots, dashes or underscores, beginning with a letter or digit;"
            f" got {run_id!r}. It names the directory of this run's autosaves."
        )
    return run_id


def run_id_of(own: str | None, argv: list[str], environment: Mapping[str, str]) -> str:
    """Return the run id of a fit.

    In a drill that is one of the drill's also where the script gives its own: no run of the user's may be gone on with.

    Args:
        own: What the callback was given.
        argv: Of the process.
        environment: Of the process.
    """
    if own is not None and not environment.get(DRILL_VARIABLE):
        return own
    default = default_run_id(argv, environment)
    if own is None:
        return default
    joined = f"{default}-{own}"
    if _ALLOWED.fullmatch(joined):
        return joined
    return f"{default}-{hashlib.blake2b(own.encode(), digest_size=6).hexdigest()}"


def default_run_id(argv: list[str], environment: Mapping[str, str]) -> str:
    """Return the run id of a command: the one in the environment, else a hash of script, arguments and array task."""
    if environment.get(RUN_ID_VARIABLE):
        return check_run_id(environment[RUN_ID_VARIABLE])
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = os.path.abspath(main) if main else "interactive"
    arguments = argv[1:] if main else []
    task = [f"{name}={environment[name]}" for name in _ARRAY_VARIABLES if environment.get(name)]
    # An argument that is no UTF-8, such as the name of a file, is text with surrogates.
    words = "\0".join([script, *arguments, *task]).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(words, digest_size=6).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).stem).strip("-._") or "run"
    return f"{stem[:_STEM_LENGTH]}-{digest}"


class Run:
    """One run's directory, here or in an object store, held against other processes until this one ends.

    Args:
        directory: Where its autosaves are.
        script: The process whose run it is: this one, or one that has made this one for a fit.
    """

    def __init__(self, directory: str, script: Script) -> None:
        self.directory = directory
        self.num_fits = 0
        self.num_open = 0
        """Fits that have not come to their end: one that is left by an exception never does."""
        self.process_id = os.getpid()
        self._script = script
        self._has_ended = False
        self._store = open_store(directory)
        self._lock = open_lock(directory)
        found = self._store.listing()  # before the lock: stores say more of what is wrong with a listing
        self.was_killed = LOCK_NAME in found.files
        """Whether an earlier process of this run could not give its lock back."""
        self._is_held_by_script = script.is_elsewhere and directory in script.held
        self._check = _is_held if self._is_held_by_script else self._lock.check
        self.history = open_history(directory, check=self._check)
        if self._is_held_by_script:
            return  # by its process, which waits for this one
        self._lock.acquire()
        try:
            self._store.abort_uploads()
        except BaseException:
            self._lock.release()
            raise
        if not script.is_elsewhere:
            script.held[directory] = 0

    def begin_fit(self, *, keep_last: int) -> AutosaveSeries:
        """Return the autosaves of the script's next fit."""
        self.num_fits = self._script.num_fits(self.directory) + 1
        self.num_open += 1
        if self._script.is_elsewhere:
            self._script.begin_fit(self.directory, self.num_fits)
        else:
            self._script.held[self.directory] = self.num_fits
        return AutosaveSeries(self._store.path(f"fit-{self.num_fits}"), keep_last=keep_last, check=self._check)

    def later_autosaves(self) -> list[str]:
        """Return the newest autosave of each fit behind the one that was begun last; they need not verify."""
        later = [name for name in self._fits() if _number(name) > self.num_fits]
        return [path for name in later for path in AutosaveSeries(self._store.path(name)).paths()[-1:]]

    def end_fit(self) -> None:
        """Note that a fit came to its end."""
        self.num_open -= 1
        if self._script.is_elsewhere:
            self._script.end_fit(self.directory)

    def leave(self) -> None:
        """Give the directory back, in a process that was made for one fit: nothing is called when such a one ends."""
        if self._script.is_elsewhere:
            if not self._is_held_by_script:
                self._lock.release()
            _runs.pop(self.directory, None)

    def end(self) -> None:
        """Remove the autosaves if all went well, and let other processes in. May be called twice."""
        if os.getpid() != self.process_id or self._has_ended:
            return
        self._has_ended = True
        # The interpreter sets these for an exception that nobody caught.
        uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        num_open = self.num_open + self._script.num_open(self.directory)
        ended_well = num_open == 0 and uncaught is None
        try:
            if ended_well:
                self.remove()
        except (OSError, CheckpointError) as error:
            _log.warning(
                "Autosaves of this run, which is done, could not be removed from %s: %s", self.directory, error
            )
        if ended_well:
            self.history.close()
        self._lock.release()
        if ended_well:
            self._remove_if_empty()

    def remove(self) -> None:
        """Remove all autosaves of this run, the last fit's first.

        A process that is killed meanwhile leaves the first fits finished, and trains the later ones again from there.
        """
        self._lock.check()
        for name in reversed(self._fits()):
            AutosaveSeries(self._store.path(name), keep_last=1).remove_all()

    def _fits(self) -> list[str]:
        return sorted((name for name in self._store.listing().folders if name.startswith("fit-")), key=_number)

    def _remove_if_empty(self) -> None:
        try:
            self._store.remove_if_empty()
        except OSError as error:
            _log.debug("%s stays: %s", self.directory, error)


def _is_held() -> None:
    """Do nothing: the script's process would be the one to find out."""


def _number(name: str) -> int:
    number = name.removeprefix("fit-")
    return int(number) if number.isdecimal() else 0


_runs: dict[str, Run] = {}


def _end_script(script: Script) -> None:
    """End the runs whose fits were all in other processes, as those of this one are ended."""
    for directory in script.directories():
        _end_run(directory, script)


def _end_run(directory: str, script: Script) -> None:
    if directory not in _runs and script.num_open(directory):
        return  # its autosaves stay
    try:
        run = _runs.get(directory) or Run(directory, script)
    except (OSError, CheckpointError) as error:
        _log.warning("The autosaves of this run, which is done, stay in %s: %s", directory, error)
    else:
        run.end()


def this_process() -> Script:
    """Return this process, as the one in which a callback is made."""
    return this_script(_end_script)


def open_run(dirpath: str | os.PathLike[str], run_id: str, script: Script | None = None) -> Run:
    """Return this process's run of that name, locked against other processes.

    Args:
        dirpath: Where the runs are.
        run_id: Which.
        script: The process in which the callback was made; this one by default.

    Raises:
        RunInUseError: If another process has it.
        CheckpointError: If the directory can't be written.
    """
    store = open_store(dirpath)
    directory = store.path(run_id) if is_url(dirpath) else os.path.realpath(store.path(run_id))
    run = _runs.get(directory)
    if run is None or run.process_id != os.getpid():
        try:
            run = _runs[directory] = Run(directory, script or this_process())
        except OSError as error:
            raise CheckpointError(
                f"The autosaves of this run can't be written to {directory}: {error}. Nothing could be resumed."
                f" {_REMOTE_ADVICE if is_url(directory) else ''}"
                "Pass FaultTolerance(dirpath=...) a directory that can be written."
            ) from error
        if script is None or not script.is_elsewhere:
            call_at_end(run.end, is_remote=is_url(directory))
    return run
