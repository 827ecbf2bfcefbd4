"""The runs that have a history, among what was found, or around it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_faulttolerant.cli.found import Found
from lightning_faulttolerant.records.history import FILE_NAME, RunHistory
from lightning_faulttolerant.records.history_parser import history_of
from lightning_faulttolerant.records.lines import count_lines, parse_lines
from lightning_faulttolerant.storage.store import is_url, local_path, open_file, open_store, split_path

_MAX_LEVELS = 3  # a checkpoint, its folder in a fit, and the fit


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


def runs_of(found: Found) -> list[FoundRun]:
    """Return the runs with a history, the most recently active first: those below a place, or the one that it is in.

    Args:
        found: What was found below the place.
    """
    runs = (_run(directory) for directory in found.histories or _above(found.path))
    return sorted((run for run in runs if run is not None), key=lambda run: run.last_seen, reverse=True)


def runs_beside(run: FoundRun) -> list[FoundRun]:
    """Return the runs with a history in the directory above that of a run, with the run.

    Args:
        run: A run.
    """
    store = open_store(next(_above(run.path)))
    try:
        found = [_run(store.path(name)) for name in store.listing().folders]
    except OSError:
        return [run]
    return [one for one in found if one is not None]


def _above(path: str) -> Iterator[str]:
    """Yield the directories above a place in a run, up to that of the run, and maybe more."""
    directory = path if is_url(path) else os.path.abspath(local_path(path))
    for _ in range(_MAX_LEVELS):
        directory = split_path(directory)[0]
        yield directory


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
