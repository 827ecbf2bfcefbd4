"""The files in the directory of a run, here or in an object store: its record, ``run.json``, and its autosaves.

The registry of runs has a place that stays the same from start to start.
"""

from __future__ import annotations

import contextlib
import logging
import os

from lightning_faulttolerant.checkpoint.autosave_directory import AUTOSAVE_NAME, fit_folders
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.records.ledger import DRILL_VARIABLE
from lightning_faulttolerant.records.runs import FILE_NAME, VARIABLE, Registry, RunRecord, record_from_json, registry_at
from lightning_faulttolerant.storage.store import is_url, open_file, open_store
from lightning_faulttolerant.trainer.identity.starts import start_directory

_OF_PYTEST = "PYTEST_CURRENT_TEST"


def registry_of_process(start_directory: str) -> Registry | None:
    """Return the registry of this process; ``None`` in a drill, and in tests, where all fits have one command.

    Args:
        start_directory: The working directory in which the process was started.
    """
    if os.environ.get(DRILL_VARIABLE):
        return None
    return registry_at(start_directory) if os.environ.get(VARIABLE) or _OF_PYTEST not in os.environ else None


def unregister(directory: str) -> None:
    """Remove a run that has no autosaves anymore from the registry of this process.

    Args:
        directory: The directory of the run.
    """
    registry = registry_of_process(start_directory(os.environ))
    if registry is not None:
        registry.remove(directory)


_log = logging.getLogger(__name__)


def read_record(directory: str) -> RunRecord | None:
    """Return the record of a run; ``None`` if it does not exist, or can't be read.

    Args:
        directory: The directory of the run, as a path or a URL.
    """
    try:
        with open_file(open_store(directory).path(FILE_NAME)) as file:
            return record_from_json(file.read())
    except (OSError, CheckpointError):
        return None


def write_record(directory: str, record: RunRecord) -> None:
    """Replace the record of a run. If that fails, training continues, but later starts know less to tell runs apart."""
    try:
        with open_store(directory).writer(FILE_NAME, fsync=False) as file:
            file.write(record.to_json())
    except (OSError, CheckpointError) as error:
        _log.warning("How this run started can't be written to %s: %s", directory, error)


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
