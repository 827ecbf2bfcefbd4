"""Questions about other processes on this machine, and which machine this is."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path


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


def this_machine() -> str:
    """Return an id that two processes share if each can tell whether the other is alive, as far as is known.

    Containers may share a host name (``--network=host``), and process ids mean nothing across containers.
    """
    try:
        return f"{this_boot()} {os.readlink('/proc/self/ns/pid')}" if this_boot() else ""
    except OSError:  # not Linux
        return ""


@lru_cache(maxsize=1)
def this_boot() -> str:
    """Return the id of the current boot of this machine. Empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""
