"""What can be told of other processes of this machine."""

from __future__ import annotations

import os


def is_alive(process_id: int) -> bool:
    """Tell whether a process of this machine is alive, or may be."""
    if os.name == "nt":  # os.kill(pid, 0) is not a question on Windows, it is a Ctrl-C.
        return True
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
