"""The record of a run in its directory, here or in an object store: ``run.json``."""

from __future__ import annotations

import contextlib
import logging

from lightning_faulttolerant.checkpoint.store import open_file, open_store
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.records.runs import FILE_NAME, RunRecord, record_from_json

_log = logging.getLogger(__name__)


def read_record(directory: str) -> RunRecord | None:
    """Return the record of a run; ``None`` if there is none, or none that can be read.

    Args:
        directory: Of the run, as a path or a URL.
    """
    try:
        with open_file(open_store(directory).path(FILE_NAME)) as file:
            return record_from_json(file.read())
    except (OSError, CheckpointError):
        return None


def write_record(directory: str, record: RunRecord) -> None:
    """Replace the record of a run. Training goes on where that fails: a later start has less to tell runs apart by."""
    try:
        with open_store(directory).writer(FILE_NAME, fsync=False) as file:
            file.write(record.to_json())
    except (OSError, CheckpointError) as error:
        _log.warning("How this run started can't be written to %s: %s", directory, error)


def remove_record(directory: str) -> None:
    """Remove the record of a run, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        open_store(directory).delete(FILE_NAME)
