"""Questions about other processes on this machine, and which machine this is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
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


def parents_and_states() -> tuple[dict[int, int], dict[int, str]]:
    """Return the parent's process id and the state of each process of the machine; nothing without ``/proc``."""
    parents: dict[int, int] = {}
    states: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name is in brackets and may contain anything.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            parents[int(entry.name)], states[int(entry.name)] = int(fields[1]), fields[0]
    return parents, states


def with_children(process_ids: set[int], parents: Mapping[int, int]) -> set[int]:
    """Return processes and all their descendants.

    Args:
        process_ids: The processes.
        parents: The parent of each process, as `parents_and_states` returns them.
    """
    found = set(process_ids)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found
