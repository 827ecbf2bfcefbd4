"""Find the runs that have a history, in a directory or below a URL."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning_faulttolerant.cli.text import remote_errors
from lightning_faulttolerant.records.history import DEFAULT_FOLDER, FILE_NAME, RunHistory
from lightning_faulttolerant.records.history_parser import history_of
from lightning_faulttolerant.records.lines import count_lines, parse_lines
from lightning_faulttolerant.storage.store import is_url, local_path, open_file, open_store, split_path


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """A run that has a history.

    Args:
        run_id: Its id, which is the name of its directory.
        path: The path or URL of that directory.
        history: The history of the run.
    """

    run_id: str
    path: str
    history: RunHistory

    @property
    def last_seen(self) -> float:
        """Time of the last known event of the run, seconds since 1970."""
        last = self.history.chapters[-1]
        return last.processes[-1].last_seen if last.done is None else last.done


def find_runs(directory: str) -> list[FoundRun]:
    """Return the runs that have a history, the most recently active first.

    Args:
        directory: Directory of a run, a ``dirpath`` with several runs, or the ``default_root_dir`` above it; or a URL
            of one of them.

    Raises:
        FileNotFoundError: If the local directory does not exist.
        OSError: If something can't be read.
    """
    with remote_errors(directory):
        if not is_url(directory):
            os.stat(local_path(directory))
        folder, name = split_path(directory)
        if name == FILE_NAME or not (is_url(directory) or os.path.isdir(local_path(directory))):
            directory = folder or "."  # of a checkpoint, the directory of its fit
        own = _run(directory) or _run(above(directory))
        runs = [own] if own is not None else runs_below(directory) or runs_below(_path(directory, DEFAULT_FOLDER))
        if not runs:
            inner = (_path(directory, name) for name in open_store(directory).listing().folders)
            runs = [run for path in inner for run in runs_below(_path(path, DEFAULT_FOLDER))]
    return sorted(runs, key=lambda run: run.last_seen, reverse=True)


def above(directory: str) -> str:
    """Return the directory above another one.

    Args:
        directory: Path or URL.
    """
    return split_path(directory if is_url(directory) else os.path.abspath(local_path(directory)))[0]


def runs_below(directory: str) -> list[FoundRun]:
    """Return the runs with a history that are directly below a directory.

    Args:
        directory: Path or URL.
    """
    found = (_run(_path(directory, name)) for name in open_store(directory).listing().folders)
    return [run for run in found if run is not None]


def _path(directory: str, name: str) -> str:
    """Return the path of a folder in the form that the user would write."""
    return open_store(directory).path(name) if is_url(directory) else os.path.join(local_path(directory), name)


def _run(directory: str) -> FoundRun | None:
    store = open_store(directory)
    if not is_url(directory) and not os.path.isfile(store.path(FILE_NAME)):
        return None
    try:
        with open_file(store.path(FILE_NAME), whole=True) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    lines = parse_lines(text)
    history = history_of(lines, num_unread=count_lines(text) - len(lines))
    if not history.chapters:
        return None
    return FoundRun(run_id=split_path(store.url)[1], path=directory, history=history)
