"""How this process was started, and the record of a run that such a start belongs to.

A start is the script, its arguments, the directory, and the launcher, if any. A run has a directory, here or in an
object store, with its record, ``run.json``, and its autosaves. The registry of runs has a place that stays the same
from start to start.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import multiprocessing
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_faulttolerant.checkpoint.autosave_files import AUTOSAVE_NAME, fit_folders
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.records.ledger import DRILL_VARIABLE
from lightning_faulttolerant.records.lines import MAX_BYTES
from lightning_faulttolerant.records.runs import (
    FILE_NAME,
    RUN_ID_VARIABLE,
    VARIABLE,
    Command,
    Registry,
    RunRecord,
    record_from_json,
    registry_at,
)
from lightning_faulttolerant.state.reachable import file_of, is_users_file
from lightning_faulttolerant.storage.store import is_url, open_file, open_store

_log = logging.getLogger(__name__)

# The number of the task in a job array. A job's own id changes each time it is submitted.
_ARRAY_VARIABLES = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "LSB_JOBINDEX", "SGE_TASK_ID")
# Packages that run other code: their own file is not the script.
_LAUNCHERS = frozenset({"coverage", "debugpy", "ipykernel", "ipykernel_launcher", "joblib", "loky", "papermill", "ray",
                        "submitit"})  # fmt: skip
_INTERACTIVE, _NOTEBOOK, _RAY = "interactive", "notebook", "ray"
_STEM_LENGTH = 64
_PACKAGES = ("purelib", "platlib")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStart:
    """How this process was started.

    Args:
        command: The command that was typed.
        is_one_of_many: Whether several processes with this command may train different models at the same time, so the
            command does not tell them apart: a worker of a pool, of Ray or submitit, a notebook without a name.
        is_killed_at_end: Whether the process is killed when its work is done.
    """

    command: Command
    is_one_of_many: bool = False
    is_killed_at_end: bool = False

    @property
    def run_id(self) -> str:
        """The default run id: the name of the script, and a hash of script, arguments, and array task."""
        command = self.command
        # An argument that is not UTF-8, such as the name of a file, is a string with surrogates.
        words = [command.script, *command.arguments, *([command.task] if command.task else [])]
        digest = hashlib.blake2b("\0".join(words).encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
        stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(command.script).stem).strip("-._") or "run"
        return f"{stem[:_STEM_LENGTH]}-{digest}"


def start_of_process(argv: list[str], environment: Mapping[str, str], *, resume_from: str = "") -> ProcessStart:
    """Return how this process was started.

    Args:
        argv: The arguments of the process.
        environment: The environment of the process.
        resume_from: Where a branch begins, if it is one.
    """
    script, arguments, is_one_of_many = _script(argv, environment)
    is_child = multiprocessing.parent_process() is not None
    words = ["python", script, *arguments] if is_child or not sys.orig_argv else sys.orig_argv
    command = Command(
        script=script,
        arguments=tuple(arguments),
        task=" ".join(f"{name}={environment[name]}" for name in _ARRAY_VARIABLES if environment.get(name)),
        words=tuple(words),
        directory=start_directory(environment),
        run_id=environment.get(RUN_ID_VARIABLE, ""),
        content=_content_of(script),
        resume_from=resume_from,
    )
    is_of_ray = is_one_of_many and arguments[:1] == [_RAY]
    is_killed_at_end = is_of_ray or "PoolWorker" in multiprocessing.current_process().name
    return ProcessStart(command=command, is_one_of_many=is_one_of_many or is_child, is_killed_at_end=is_killed_at_end)


def start_directory(environment: Mapping[str, str]) -> str:
    """Return the working directory in which the process was started, as far as it is known.

    Hydra knows it. Otherwise it is the shell's directory, if the name of the script leads to the script from there, or
    if this package was imported there: the script has changed its directory since. ``PWD`` alone says little: code that
    starts a process in another directory seldom changes it.

    Args:
        environment: The environment of the process.
    """
    hydra = hydra_config()
    if hydra is not None:
        return str(hydra.runtime.cwd)
    now, shell = _working_directory(), environment.get("PWD", "")
    if not os.path.isabs(shell) or not os.path.isdir(shell) or _is_same(shell, now):
        return now
    typed, main = sys.argv[0] if sys.argv else "", _main_file()
    if main and typed and not os.path.isabs(typed):
        return next((path for path in (shell, now) if _is_same(os.path.join(path, typed), main)), now)
    return shell if _is_same(shell, _IMPORTED_IN) else now


def _absolute(path: str) -> str:
    return os.path.normpath(os.path.join(_working_directory(), path))


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # the directory was removed
        return os.environ.get("PWD") or os.path.sep


def _is_same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _content_of(script: str) -> str:
    try:
        return hashlib.blake2b(Path(script).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def hydra_config() -> Any:
    """Return the configuration of Hydra itself if Hydra started this script, else ``None``."""
    module = sys.modules.get("hydra.core.hydra_config")
    return module.HydraConfig.get() if module is not None and module.HydraConfig.initialized() else None


def _script(argv: list[str], environment: Mapping[str, str]) -> tuple[str, list[str], bool]:
    """Return the script, its arguments, and whether several processes like this one may run at the same time."""
    main = _main_file()
    if main is None:
        return _without_file(environment)
    launcher = _launcher_of(main)
    launched = os.path.join(_working_directory(), argv[0]) if argv and argv[0] else ""
    if launcher is not None and os.path.isfile(launched) and _launcher_of(launched) is None:
        main, launcher = launched, None  # a debugger or a profiler put its script there
    if launcher is not None and launcher != "":
        return _file_of_caller() or launcher, [launcher, start_directory(environment)], True
    hydra = hydra_config()
    if hydra is not None:
        return _absolute(main), [str(hydra.job.config_name), *map(str, hydra.overrides.task)], False
    return _absolute(main), argv[1:], False


def _without_file(environment: Mapping[str, str]) -> tuple[str, list[str], bool]:
    """Return the same for a notebook, or for a session in which the user types code."""
    names = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    if "get_ipython" not in names:
        return _INTERACTIVE, [], False
    name = names.get("__vsc_ipynb_file__") or environment.get("JPY_SESSION_NAME")
    if name:
        return _absolute(str(name)), [], False
    return _NOTEBOOK, [start_directory(environment)], True


def _file_of_caller() -> str | None:
    """Return the script with the function that a launcher runs: the outermost user file on the call stack."""
    frame, found = inspect.currentframe(), None
    while frame is not None:
        path = file_of(frame)
        if os.path.isfile(path) and is_users_file(path):
            found = path
        frame = frame.f_back
    return found


def _main_file() -> str | None:
    return getattr(sys.modules.get("__main__"), "__file__", None)


def _launcher_of(path: str) -> str | None:
    """Return the launcher that a file belongs to; ``""`` for Python's own files, ``None`` for the user's."""
    for name in _PACKAGES:
        inside = _path_inside(path, sysconfig.get_path(name))
        if inside is not None:
            top = inside.parts[0].removesuffix(".py")
            return top if top in _LAUNCHERS else None
    return "" if _path_inside(path, sysconfig.get_path("stdlib")) is not None else None


def _path_inside(path: str, directory: str) -> Path | None:
    """Return the path of a file relative to a directory, or ``None`` if it is outside.

    The directory may be reached by a link, and its contents may be links too, as uv and Bazel install packages.
    """
    for file, root in ((Path(path), Path(directory)), (Path(path).resolve(), Path(directory).resolve())):
        if file.is_relative_to(root):
            return file.relative_to(root)
    return None


_IMPORTED_IN = _working_directory()


_OF_PYTEST = "PYTEST_CURRENT_TEST"


def registry_of_process(start_directory: str) -> Registry | None:
    """Return the registry of this process; ``None`` in a drill, and in tests, where all fits have one command.

    Args:
        start_directory: The working directory in which the process was started.
    """
    if os.environ.get(DRILL_VARIABLE):
        return None
    return registry_at(start_directory) if os.environ.get(VARIABLE) or _OF_PYTEST not in os.environ else None


def discard_line(autosave: str) -> str:
    """Return the command that lets the run of an autosave start over."""
    directory = autosave.rpartition("/")[0].rpartition("/")[0]
    has_registry = registry_of_process(start_directory(os.environ)) is not None
    run = os.path.basename(directory) if has_registry else directory
    return f"lightning-faulttolerant discard {shlex.quote(run)}"


def unregister(directory: str) -> None:
    """Remove a run that has no autosaves anymore from the registry of this process.

    Args:
        directory: The directory of the run.
    """
    registry = registry_of_process(start_directory(os.environ))
    if registry is not None:
        registry.remove(directory)


def read_record(directory: str) -> RunRecord | None:
    """Return the record of a run; ``None`` if it does not exist, or can't be read.

    Args:
        directory: The directory of the run, as a path or a URL.
    """
    try:
        with open_file(open_store(directory).path(FILE_NAME)) as file:
            return record_from_json(file.read(MAX_BYTES + 1))
    except (OSError, CheckpointError):
        return None


def write_record(directory: str, record: RunRecord) -> None:
    """Replace the record of a run. If that fails, training continues, but later starts know less to tell runs apart."""
    try:
        with open_store(directory).writer(FILE_NAME, fsync=False) as file:
            file.write(record.to_json())
    except (OSError, CheckpointError) as error:
        _log.warning("How this run started can't be written to %s, so it may not be recognized: %s", directory, error)


def remove_record(directory: str) -> None:
    """Remove the record of a run, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        open_store(directory).delete(FILE_NAME)


def autosaves_of(directory: str) -> list[tuple[str, str]]:
    """Return a run's autosaves, each as the name of its fit's directory and its own name; none if listing fails.

    Args:
        directory: The directory of the run, as a path or a URL.
    """
    if not is_url(directory) and not os.path.isdir(directory):
        return []
    try:
        store = open_store(directory)
        folders = fit_folders(store.listing().folders)
        return [(one, name) for one in folders for name in store.folder(one).names() if AUTOSAVE_NAME.fullmatch(name)]
    except Exception:  # noqa: BLE001 - clients of stores raise their own errors; code that opens the run gets them
        return []
