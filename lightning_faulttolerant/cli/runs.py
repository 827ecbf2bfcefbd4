"""The unfinished runs of a registry, for the commands that take a run by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_faulttolerant.checkpoint.store import is_url, local_path, open_store
from lightning_faulttolerant.cli.errors import remote_errors
from lightning_faulttolerant.cli.found import FoundFile, find_checkpoints
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.records.registry import Entry, Registry, registry_at


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedRun:
    """A run of the registry.

    Args:
        entry: What the registry says of it.
        newest: Its newest autosave.
    """

    entry: Entry
    newest: FoundFile


def registry_here() -> Registry:
    """Return the registry of the runs that were started in this directory, or the one that the variable names."""
    return registry_at(os.getcwd())


def unfinished_runs(registry: Registry) -> Iterator[UnfinishedRun]:
    """Yield the runs that have autosaves; those whose directory is gone have none.

    Args:
        registry: In which they are.
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
        name: Its run id, as the registry has it, or its directory or URL.

    Raises:
        FileNotFoundError: If there is none.
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
