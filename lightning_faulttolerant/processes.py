"""Questions about other processes on this machine, and which machine this is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from functools import lru_cache
from pathlib import Path

_SESSION, _STARTED_AT = 3, 19
"""The places of a process's session and start among the fields of its ``stat`` from its state on."""


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


def started_at(process_id: int) -> int:
    """Return when a process started, in the clock ticks of ``/proc``; 0 if unknown."""
    fields = _stat_fields(process_id)
    return int(fields[_STARTED_AT]) if len(fields) > _STARTED_AT else 0


def is_running(process_id: int, started: int = 0) -> bool:
    """Return whether a process is alive and has not ended, as a zombie has.

    Args:
        process_id: The process.
        started: When it started, as `started_at` returns it: another process may have the same id by now. 0 if unknown.
    """
    if not is_alive(process_id):
        return False
    fields = _stat_fields(process_id)
    if not fields:  # it has gone in between, or this is not Linux
        return not _stat_fields(os.getpid())
    return fields[0] not in "ZX" and started in (0, int(fields[_STARTED_AT]))


def _stat_fields(process_id: int) -> list[str]:
    """Return the fields of a process's ``stat`` from its state on; nothing without ``/proc``."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name is in brackets and may contain anything


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
        process_id = int(entry.name)
        if fields := _stat_fields(process_id):
            states[process_id], parents[process_id] = fields[0], int(fields[1])
    return parents, states


def in_sessions(leaders: Set[int]) -> set[int]:
    """Return the processes of sessions that have not ended; nothing without ``/proc``.

    Args:
        leaders: The process ids of the leaders, which the sessions keep when their leaders have ended.
    """
    fields = {int(entry.name): _stat_fields(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    return {one for one, stat in fields.items() if stat and int(stat[_SESSION]) in leaders and stat[0] not in "ZX"}


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
