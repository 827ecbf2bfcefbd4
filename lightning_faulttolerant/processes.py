"""Questions about other processes on this machine."""

from __future__ import annotations

import os


def is_alive(process_id: int) -> bool:
    """Return whether a process on this machine is alive, or may be."""
    if os.name == "nt":  # on Windows, os.kill(pid, 0) sends a Ctrl-C
        return True
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
