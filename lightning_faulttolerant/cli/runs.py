"""The unfinished runs of a registry, for commands that take the name of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_faulttolerant.cli.errors import remote_errors
from lightning_faulttolerant.cli.found import FoundFile, find_checkpoints
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.records.runs import RegisteredRun, Registry, registry_at
from lightning_faulttolerant.storage.store import is_url, local_path, open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedRun:
    """A run of the registry.

    Args:
        entry: Its entry in the registry.
        newest: Its newest autosave.
    """

    entry: RegisteredRun
    newest: FoundFile


def registry_here() -> Registry:
    """Return the registry of the runs started in this directory, or the one that the environment variable names."""
    return registry_at(os.getcwd())


def unfinished_runs(registry: Registry) -> Iterator[UnfinishedRun]:
    """Yield the runs that have autosaves. A run without its directory has none.

    Args:
        registry: The registry with the runs.
    """
    for entry in registry.entries():
        try:
            files = [file for file in find_checkpoints(entry.directory).files if file.is_autosave]
        except (OSError, CheckpointError):
            continue
        if files:
            yield UnfinishedRun(entry=entry, newest=max(files, key=lambda file: (file.saved_at or 0.0, file.sequence)))


def directory_of_run(name: str) -> str:
    """Return the directory of a run.

    Args:
        name: The run id as in the registry, or the directory or URL of the run.

    Raises:
        FileNotFoundError: If no run has this name.
        CheckpointError: If several runs have this id.
    """
    if is_url(name):
        with remote_errors(name):
            open_store(name).listing()
        return name
    entries = [entry for entry in registry_here().entries() if entry.run_id == name]
    if len(entries) > 1:
        names = "".join(f"\n  {entry.directory}" for entry in entries)
        raise CheckpointError(f"There are {len(entries)} runs with the id {name}. Give the directory of one:{names}")
    if entries:
        return entries[0].directory
    path = os.path.abspath(local_path(name))
    if not os.path.isdir(path):
        raise FileNotFoundError(f"There is no run {name}: neither in {registry_here().directory} nor as a directory")
    return path
