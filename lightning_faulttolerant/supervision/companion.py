"""Our own process next to the processes of a run, in its own session: what ends the run does not end it."""

from __future__ import annotations

import os
import sys


def start_companion(module: str, *arguments: str, standard_input: int | None = None) -> int:
    """Start ``python -m MODULE ARGUMENTS``; return its process id.

    Args:
        module: The module.
        arguments: Its arguments.
        standard_input: A descriptor for its standard input. It reads nothing by default.

    Raises:
        OSError: If it can't be started.
        NotImplementedError: If this system can't start a process in a new session.
    """
    # Without the settings of the run: the companion is not one.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    words = [sys.executable, "-m", module, *arguments]
    source = (
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        if standard_input is None
        else (os.POSIX_SPAWN_DUP2, standard_input, 0)
    )
    return os.posix_spawn(sys.executable, words, variables, file_actions=[source], setsid=True)
