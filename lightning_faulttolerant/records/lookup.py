"""What the command ``batch`` requests of the script's processes: the directory of their run, and nothing else.

The request is a path in the environment. The first process writes the directory there, and all processes end before
they read, train, or save anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

LOOKUP_VARIABLE = "PL_FAULT_TOLERANT_LOOKUP"
"""For the command ``batch``: the file that receives the directory of the run."""


def lookup_requested(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the file that the directory of the run goes to, if this process belongs to such a request.

    Args:
        environment: The environment of the process.
    """
    return environment.get(LOOKUP_VARIABLE) or None


def write_lookup(path: str, directory: str | None) -> None:
    """Write where the run is; ``None`` if there is none."""
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(directory or "")
    os.replace(temporary, path)


def read_lookup(path: str) -> str | None:
    """Return what `write_lookup` has written: ``""`` if there is no run; ``None`` if it was never called."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except FileNotFoundError:
        return None
