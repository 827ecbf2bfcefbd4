"""The place of the registry of runs: it stays the same from start to start."""

from __future__ import annotations

import os

from lightning_faulttolerant.records.ledger import DRILL_VARIABLE
from lightning_faulttolerant.records.registry import VARIABLE, Registry, registry_at
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
